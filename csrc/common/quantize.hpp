// Stochastic quantization in blocks: QSGD (Alistarh et al., NeurIPS 2017) with the block's largest magnitude as its norm.
//
// A block of quantized_block elements has a unit u, and an element x becomes one of the two integers next to x / u,
// drawn so that the mean is x / u: unbiased, with a variance of at most u^2 / 4. The integers are -L .. L for
// L = 2^(bits - 1) - 1 and are stored with L added; with 4 bits the code of the block's second half is the upper half
// of the byte.
//
// u is the largest magnitude / L, rounded up to 16 significant bits, so that every integer times u is exact in float32,
// and no smaller than the smallest normal float32. A block of zeros has u = 0 and stays zero. A block with an infinity
// or a NaN, or whose u exceeds float32, has u = NaN and becomes NaN as a whole: what is lost cannot pass unnoticed.
#pragma once

#include "half.hpp"
#include "mix.hpp"

namespace hvs {

constexpr std::size_t quantized_block = 256;
constexpr std::size_t half_block = quantized_block / 2;

HVS_FUNCTION constexpr int largest_level(int bits) { return (1 << (bits - 1)) - 1; }

// The unit of a block with this largest magnitude, which may be infinite or NaN.
HVS_FUNCTION float unit_of(double largest, int level) {
  if (largest == 0) return 0;
  constexpr std::uint64_t dropped = (std::uint64_t(1) << (52 - 15)) - 1;
  constexpr double largest_float = 0x1.fffffep127, smallest_float = 0x1p-126;
  const double unit = bit_cast<double>((bit_cast<std::uint64_t>(largest / level) + dropped) & ~dropped);
  if (!(unit <= largest_float)) return float_of(0x7fc00000);
  return float(unit < smallest_float ? smallest_float : unit);
}

// Two numbers come out of each 64 random bits: those of the positions i and half_block + i of a block.
HVS_FUNCTION std::uint64_t pair_bits(std::uint64_t key, std::size_t block, std::size_t i) {
  return random_bits(key, block * half_block + i);
}

// An odd multiple of 2^-24 in 0 .. 1: the mean is one half.
template <class Real> HVS_FUNCTION Real drawn_from(std::uint32_t random) {
  return Real(std::int32_t(random >> 8 | 1)) * Real(0x1p-24);
}

// The code of an element. Up from below, with the probability of the distance to it. What rounding adds to a quotient
// at the largest level is less than the smallest number drawn: no code leaves its range.
template <class Real> HVS_FUNCTION std::uint8_t code_of(Real x, Real unit, int level, Real drawn) {
  const Real exact = x / unit;
  const auto truncated = std::int32_t(exact);
  const std::int32_t below = truncated - std::int32_t(exact < Real(truncated));
  return std::uint8_t(level + below + std::int32_t(drawn < exact - Real(below)));
}

// What a code stands for; `factor` is the unit times whatever is asked for.
template <class Real> HVS_FUNCTION Real number_of(std::uint8_t code, int level, Real factor) {
  return Real(std::int32_t(code) - level) * factor;
}

}  // namespace hvs
