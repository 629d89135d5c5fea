// 16-bit floating-point formats. Conversions have no branches, so that compilers vectorise the loops around them.
#pragma once

#include "portable.hpp"

namespace hvs {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

HVS_FUNCTION std::uint32_t bits_of(float x) { return bit_cast<std::uint32_t>(x); }
HVS_FUNCTION float float_of(std::uint32_t bits) { return bit_cast<float>(bits); }

HVS_FUNCTION float widen(BFloat16 x) { return float_of(std::uint32_t(x.bits) << 16); }

HVS_FUNCTION float widen(Half x) {
  const std::uint32_t sign = std::uint32_t(x.bits & 0x8000) << 16;
  const std::uint32_t rest = x.bits & 0x7fff;
  // Subnormal halves are multiples of 2^-24; the others change their exponent bias from 15 to 127.
  const std::uint32_t subnormal = bits_of(float(std::int32_t(rest)) * 0x1p-24f);
  const std::uint32_t normal = (rest << 13) + (std::uint32_t(rest < 0x7c00 ? 112 : 224) << 23);
  // NaN becomes quiet, as with a conversion instruction.
  const std::uint32_t quiet = rest > 0x7c00 ? 0x400000 : 0;
  return float_of(sign | (rest < 0x400 ? subnormal : normal) | quiet);
}

// The nearest value of the format, as the conversions round; for finite values that do not overflow.
template <class Stored> HVS_FUNCTION float nearest(float x);

template <> HVS_FUNCTION float nearest<BFloat16>(float x) {
  const std::uint32_t bits = bits_of(x);
  return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

template <> HVS_FUNCTION float nearest<Half>(float x) {
  const std::uint32_t rest = bits_of(x) & 0x7fffffff;
  const std::uint32_t subnormal = bits_of((float_of(rest) + 0.5f) - 0.5f);
  const std::uint32_t normal = (rest + 0xfff + (rest >> 13 & 1)) & 0xffffe000u;
  return float_of((bits_of(x) & 0x80000000u) | (rest < 0x38800000 ? subnormal : normal));
}

// Both conversions round to nearest, ties to even. NaN becomes a quiet NaN, overflow becomes infinity.
HVS_FUNCTION BFloat16 to_bfloat16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const std::uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
  return {std::uint16_t((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

HVS_FUNCTION Half to_half(float x) {
  const std::uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const std::uint32_t rest = bits_of(x) & 0x7fffffff;
  // Adding 0.5 aligns a value below 2^-14 to the spacing of subnormal halves, 2^-24, and rounds it.
  const std::uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3f000000;
  const std::uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
  const std::uint32_t finite = rest < 0x38800000 ? subnormal : normal;
  const std::uint32_t overflow = rest > 0x7f800000 ? 0x7e00 | (rest >> 13 & 0x3ff) : 0x7c00;
  return {std::uint16_t(sign | (rest < 0x47800000 ? finite : overflow))};
}

}  // namespace hvs
