#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../common/bits.hpp"
#include "../common/half.hpp"
#include "simd/dispatch.hpp"
#include "statistics/statistics.hpp"

namespace hvs {
namespace {

constexpr std::size_t streams = 4;       // parts of a tensor that are read together, so that their cache misses overlap
constexpr std::size_t part = 16 << 10;  // bytes of a part; the result is checked after each group of parts

// Without the sign bit, the bits of a float are ordered like its magnitude, with NaN above infinity. Every compiler
// vectorises loops over integers without branches, for every width.
template <class Word> HVS_INLINE Word larger(Word found, const char* data) {
  Word word;
  std::memcpy(&word, data, sizeof word);
  return std::max(found, Word(word & std::numeric_limits<Word>::max()));
}

// Scans `streams` adjacent parts.
template <class Word> struct Adjacent {
  static HVS_INLINE void run(const char* data, Word* result) {
    Word found = *result;
    for (std::size_t i = 0; i < part; i += sizeof(Word)) {
      for (std::size_t s = 0; s < streams; ++s) found = larger(found, data + s * part + i);
    }
    *result = found;
  }
};

// The largest magnitude as an integer; stops at a non-finite element.
template <class Word> Word largest_word(const Tensor& t, Word infinite) {
  const char* data = t.data;
  std::size_t left = t.length;
  Word found = 0;
  if (t.stride == std::ptrdiff_t(sizeof(Word))) {
    for (; left * sizeof(Word) >= streams * part; left -= streams * part / sizeof(Word), data += streams * part) {
      run_at_level<Adjacent<Word>>(data, &found);
      if (found >= infinite) return found;
    }
  }
  for (std::size_t i = 0; i < left; ++i) found = larger(found, data + std::ptrdiff_t(i) * t.stride);
  return found;
}

double largest_of(const Tensor& t) {
  switch (t.format) {
    case Format::float32: return float_of(std::uint32_t(largest_word<std::int32_t>(t, 0x7f800000)));
    case Format::float16: return widen(Half{std::uint16_t(largest_word<std::int16_t>(t, 0x7c00))});
    case Format::bfloat16: return widen(BFloat16{std::uint16_t(largest_word<std::int16_t>(t, 0x7f80))});
    case Format::float64: return bit_cast<double>(largest_word<std::int64_t>(t, 0x7ff0000000000000));
  }
  return std::numeric_limits<double>::infinity();
}

}  // namespace

double largest(const std::vector<Tensor>& tensors) {
  double found = 0;
  for (const Tensor& t : tensors) {
    const double one = largest_of(t);
    if (!std::isfinite(one)) return std::numeric_limits<double>::infinity();
    found = std::max(found, one);
  }
  return found;
}

}  // namespace hvs
