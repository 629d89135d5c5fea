// Magnitudes of floating-point numbers as integers in the same order.
#pragma once

#include "portable.hpp"

namespace hvs {

template <class Real> struct Bits;
template <> struct Bits<float> {
  using Key = std::int32_t;
  using Unsigned = std::uint32_t;
  static constexpr int width = 31;
};
template <> struct Bits<double> {
  using Key = std::int64_t;
  using Unsigned = std::uint64_t;
  static constexpr int width = 63;
};

// Keys are nonnegative. The type is signed because SSE2 and AVX2 compare only signed integers.
template <class Real> using Key = typename Bits<Real>::Key;

template <class Real> constexpr Key<Real> largest_key = Key<Real>(~typename Bits<Real>::Unsigned(0) >> 1);

// The bits of |x|. Keys are ordered like |x|, with infinity above every finite number and NaN above infinity.
template <class Real> HVS_FUNCTION Key<Real> magnitude(Real x) { return bit_cast<Key<Real>>(x) & largest_key<Real>; }

// The k-th largest magnitude is in low .. high with near certainty; `guess` is the estimate in between.
template <class Key> struct Bracket {
  Key low, guess, high;
};

}  // namespace hvs
