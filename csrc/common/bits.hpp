// The magnitude order of floating-point numbers, as an order of integers.
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

// Keys are never negative; they are signed because SSE2 and AVX2 only compare signed integers.
template <class Real> using Key = typename Bits<Real>::Key;

template <class Real> constexpr Key<Real> largest_key = Key<Real>(~typename Bits<Real>::Unsigned(0) >> 1);

// The bits of |x|: ordered like |x|, infinity above every number and NaN above infinity.
template <class Real> HVS_FUNCTION Key<Real> magnitude(Real x) { return bit_cast<Key<Real>>(x) & largest_key<Real>; }

// Estimates of the k-th largest magnitude: at most `low` and at least `high` with near certainty, `guess` in between.
template <class Key> struct Bracket {
  Key low, guess, high;
};

}  // namespace hvs
