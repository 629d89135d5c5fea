#include <algorithm>

#include "simd/dispatch.hpp"
#include "statistics/statistics.hpp"

namespace hvs {
namespace {

constexpr std::size_t streams = 4;       // places of a tensor that are read at the same time: as many cache misses overlap
constexpr std::size_t part = 16 << 10;  // bytes from one to the next, between two looks at the result

// An element is finite unless all bits of its exponent are set; then the lowest of them carries into the sign. Without
// branches and comparisons every compiler vectorises the loops, for every width.
template <class Word> HVS_INLINE Word carried(const char* data, Word exponent) {
  Word word;
  std::memcpy(&word, data, sizeof word);
  return Word((word & exponent) + (exponent & (~exponent + 1)));
}

template <class Word> HVS_INLINE bool is_finite(Word found, Word exponent) {
  return !(found & ~(exponent | ((exponent & (~exponent + 1)) - 1)));
}

// Looks at `streams` adjacent parts.
template <class Word> struct Adjacent {
  static HVS_INLINE void run(const char* data, Word exponent, bool* finite) {
    Word found = 0;
    for (std::size_t i = 0; i < part; i += sizeof(Word)) {
      for (std::size_t s = 0; s < streams; ++s) found |= carried<Word>(data + s * part + i, exponent);
    }
    *finite = is_finite(found, exponent);
  }
};

template <class Word> bool finite_tensor(const Tensor& t, Word exponent) {
  const char* data = t.data;
  std::size_t left = t.length;
  if (t.stride == std::ptrdiff_t(sizeof(Word))) {
    for (; left * sizeof(Word) >= streams * part; left -= streams * part / sizeof(Word), data += streams * part) {
      bool finite = false;
      run_at_level<Adjacent<Word>>(data, exponent, &finite);
      if (!finite) return false;
    }
  }
  Word found = 0;
  for (std::size_t i = 0; i < left; ++i) found |= carried<Word>(data + std::ptrdiff_t(i) * t.stride, exponent);
  return is_finite(found, exponent);
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
