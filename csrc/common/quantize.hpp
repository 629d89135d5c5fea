// Stochastic quantization in blocks: QSGD (Alistarh et al., NeurIPS 2017) with the block's largest magnitude as its norm.
//
// A block of quantized_block elements has a unit u. An element x becomes one of the two integers next to x / u, drawn
// so that the mean is x / u: unbiased, with a variance of at most u^2 / 4. The integers are -L .. L and are stored with
// L added, where L = 2^(bits - 1) - 1. With 4 bits, the upper half of a byte holds a code of the block's second half.
//
// u is the largest magnitude / L, rounded up to 24 - bits significant bits, so that every integer times u is a float32.
// It is at least the smallest normal float32. A block of zeros has u = 0 and stays zero. A block with an infinity or a
// NaN, or whose u exceeds float32, has u = NaN and becomes all NaN, so that the loss is noticed.
#pragma once

#include "half.hpp"
#include "mix.hpp"

namespace hvs {

constexpr std::size_t quantized_block = 256;
constexpr std::size_t half_block = quantized_block / 2;

HVS_FUNCTION constexpr int largest_level(int bits) { return (1 << (bits - 1)) - 1; }

// An unsigned integer that holds a code.
template <int bits> struct CodeOf {
  using Type = std::uint8_t;
};
template <> struct CodeOf<16> {
  using Type = std::uint16_t;
};
template <int bits> using Code = typename CodeOf<bits>::Type;

// The unit of a block whose largest magnitude is `largest`, which may be infinite or NaN.
template <int bits> HVS_FUNCTION float unit_of(double largest) {
  if (largest == 0) return 0;
  constexpr std::uint64_t dropped = (std::uint64_t(1) << (52 - (24 - bits - 1))) - 1;
  constexpr double largest_float = 0x1.fffffep127, smallest_float = 0x1p-126;
  const double exact = largest / largest_level(bits);
  const double unit = bit_cast<double>((bit_cast<std::uint64_t>(exact) + dropped) & ~dropped);
  if (!(unit <= largest_float)) return float_of(0x7fc00000);
  return float(unit < smallest_float ? smallest_float : unit);
}

// 64 random bits, from which the positions i and half_block + i of a block draw their numbers.
HVS_FUNCTION std::uint64_t pair_bits(std::uint64_t key, std::size_t block, std::size_t i) {
  return random_bits(key, block * half_block + i);
}

// An odd multiple of 2^-24 in 0 .. 1; the mean is one half.
template <class Real> HVS_FUNCTION Real drawn_from(std::uint32_t random) {
  return Real(std::int32_t(random >> 8 | 1)) * Real(0x1p-24);
}

// The code of an element: rounds up with a probability equal to the distance from the integer below. At the largest
// level, the rounding error of the quotient is less than the smallest number drawn, so no code leaves its range.
template <int bits, class Real> HVS_FUNCTION Code<bits> code_of(Real x, Real unit, Real drawn) {
  const Real exact = x / unit;
  const auto truncated = std::int32_t(exact);
  const std::int32_t below = truncated - std::int32_t(exact < Real(truncated));
  return Code<bits>(largest_level(bits) + below + std::int32_t(drawn < exact - Real(below)));
}

// The value of a code; `factor` is the unit times the caller's scale.
template <int bits, class Real> HVS_FUNCTION Real number_of(Code<bits> code, Real factor) {
  return Real(std::int32_t(code) - largest_level(bits)) * factor;
}

}  // namespace hvs
