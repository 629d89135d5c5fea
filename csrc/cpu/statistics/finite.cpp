#include "statistics/statistics.hpp"

#include <algorithm>

namespace hvs {
namespace {

constexpr std::size_t tile = 4096;  // elements between two looks at the result

// An element is finite unless all bits of its exponent are set; then the lowest of them carries into the sign. Without
// branches and comparisons every compiler vectorises the loop, for every width.
template <class Word> bool finite_words(const char* data, std::ptrdiff_t stride, std::size_t n, Word exponent) {
  const Word carry = exponent & (~exponent + 1);  // its lowest bit
  Word found = 0;
  for (std::size_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, data + std::ptrdiff_t(i) * stride, sizeof word);
    found |= Word((word & exponent) + carry);
  }
  return !(found & ~(exponent | (carry - 1)));
}

template <class Word> bool finite_tensor(const Tensor& t, Word exponent) {
  constexpr auto adjacent = std::ptrdiff_t(sizeof(Word));
  for (std::size_t i = 0; i < t.length; i += tile) {
    const char* const data = t.data + std::ptrdiff_t(i) * t.stride;
    const std::size_t n = std::min(tile, t.length - i);
    const bool finite = t.stride == adjacent ? finite_words<Word>(data, adjacent, n, exponent)
                                             : finite_words<Word>(data, t.stride, n, exponent);
    if (!finite) return false;
  }
  return true;
}

bool finite(const Tensor& t) {
  switch (t.format) {
    case Format::float32: return finite_tensor<std::uint32_t>(t, 0x7f800000);
    case Format::float16: return finite_tensor<std::uint16_t>(t, 0x7c00);
    case Format::bfloat16: return finite_tensor<std::uint16_t>(t, 0x7f80);
    case Format::float64: return finite_tensor<std::uint64_t>(t, 0x7ff0000000000000);
  }
  return false;
}

}  // namespace

bool all_finite(const std::vector<Tensor>& tensors) { return std::all_of(tensors.begin(), tensors.end(), finite); }

}  // namespace hvs
