// Codes of indices and values, the same on every device. docs/wire.md describes the format.
#pragma once

#include "half.hpp"
#include "portable.hpp"

namespace hvs {

// --- positions -----------------------------------------------------------------------------------------------------

// Number of 64-bit words that hold the low bits of `gaps` gaps.
HVS_FUNCTION std::uint64_t low_words(std::uint64_t gaps, int bits) { return (gaps * std::uint64_t(bits) + 63) / 64; }

// Upper bound of the words of the high parts: a one per gap, and a zero per 2^bits positions between the indices.
HVS_FUNCTION std::uint64_t most_high_words(std::uint64_t gaps, std::uint64_t span, int bits) {
  return (gaps + ((span - gaps) >> bits) + 63) / 64;
}

// --- logarithmic levels --------------------------------------------------------------------------------------------

// Nonzero magnitudes of a code of 4 or 8 bits. As bits of a float32, level `largest` is `top`, and each lower level is
// 2^shift less. All bit patterns are multiples of 2^shift, so a level has 23 - shift mantissa bits: levels are
// equidistant within an octave, and their sums are exact. The sign bit alone is the code of every non-finite value.
struct Levels {
  std::int32_t top, shift, largest;
};

HVS_FUNCTION std::int32_t largest_level_of(int bits) { return (1 << (bits - 1)) - 1; }

// The magnitude of a level, from 1 on.
HVS_FUNCTION float magnitude_of(const Levels& levels, std::int32_t level) {
  const std::int32_t key = levels.top - ((levels.largest - level) << levels.shift);
  return float_of(std::uint32_t(key < 0 ? 0 : key));
}

constexpr std::int32_t infinite_key = 0x7f800000;

// The bits of |x| as a float32. Finite numbers beyond its range get the bits of the largest finite float32.
HVS_FUNCTION std::int32_t key_of(float x) { return std::int32_t(bits_of(x) & 0x7fffffff); }
HVS_FUNCTION std::int32_t key_of(double x) {
  const std::int32_t key = key_of(float(x));
  return key == infinite_key && x - x == 0 ? infinite_key - 1 : key;
}

// The code of the nearest level; ties go to the lower level. The code is zero for less than half of the lowest level.
HVS_FUNCTION std::uint8_t level_code(const Levels& levels, std::int32_t key, bool negative) {
  const std::int32_t sign = levels.largest + 1;
  const std::int32_t below = key < levels.top ? levels.top - key : 0;
  const std::int32_t level = levels.largest - ((below + (1 << (levels.shift - 1))) >> levels.shift);
  const bool tiny = float_of(std::uint32_t(key)) < 0.5f * magnitude_of(levels, 1);
  const std::int32_t code = level < 1 ? (tiny ? 0 : 1) : level;
  const std::int32_t signed_code = code == 0 ? 0 : code + (negative ? sign : 0);
  return std::uint8_t(key >= infinite_key ? sign : signed_code);
}

// The value of a code; NaN for the code of non-finite values. A level of 0 has no sign, as its next code has none.
HVS_FUNCTION float level_value(const Levels& levels, std::int32_t code) {
  const std::int32_t level = code & levels.largest;
  const std::uint32_t sign = code > levels.largest ? 0x80000000u : 0u;
  const std::uint32_t magnitude = bits_of(magnitude_of(levels, level));
  return float_of(level == 0 ? (sign ? 0x7fc00000u : 0u) : magnitude == 0 ? 0u : sign | magnitude);
}

}  // namespace hvs
