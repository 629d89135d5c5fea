// Sums of a tile in the order of ../common/sums.hpp, so that their bits do not depend on the SIMD level. The lanes are
// vectors of `width` doubles; a level chooses only the width.
//
// Elements are widened to float64 first, which is exact: squares of float32 neither overflow nor underflow.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../common/sums.hpp"
#include "simd/level.hpp"
#include "simd/target.hpp"

namespace hvs {

template <class Element, std::size_t width> struct Vector {
  typedef Element Type __attribute__((vector_size(width * sizeof(Element))));
};

// Loops::update_velocity, which compilers vectorise.
template <class Real>
HVS_INLINE void update_velocity_lanes(const Real* gradient, Real* values, std::size_t n, const Velocity<Real>& how,
                                      Real* added) {
  const Real momentum = how.momentum, share = how.share, fresh = how.fresh, weight = how.weight;
  if (added == values) {
    for (std::size_t i = 0; i < n; ++i) values[i] = momentum * values[i] + share * gradient[i];
    return;
  }
  for (std::size_t i = 0; i < n; ++i) {
    const Real u = momentum * values[i] + share * gradient[i];
    values[i] = u;
    added[i] = fresh * gradient[i] + weight * u;
  }
}

// A running value per lane.
template <std::size_t width> struct Lanes {
  static constexpr std::size_t parts = lanes_of_sums / width;
  typename Vector<double, width>::Type part[parts] = {};

  template <class Fold> HVS_INLINE double fold(const Fold& add) const {
    double x[lanes_of_sums];
    std::memcpy(x, part, sizeof x);
    for (std::size_t n = lanes_of_sums / 2; n > 0; n /= 2) {
      for (std::size_t i = 0; i < n; ++i) x[i] = add(x[i], x[i + n]);
    }
    return x[0];
  }
  HVS_INLINE double sum() const {
    return fold([](double x, double y) { return x + y; });
  }
  HVS_INLINE double largest() const {
    return fold([](double x, double y) { return std::max(x, y); });
  }
};

template <std::size_t width> struct MomentLanes {
  using Wide = typename Vector<double, width>::Type;
  Lanes<width> sum, squares, magnitudes, largest;

  // buffer <- acc for one element per lane; adds it to the sums.
  template <bool fresh, class Real> HVS_INLINE void add(const Real* gradient, Real* buffer, Real scale) {
    using Narrow = typename Vector<Real, width>::Type;
    using Bits = typename Vector<std::int64_t, width>::Type;
    for (std::size_t p = 0; p < Lanes<width>::parts; ++p) {
      Narrow added, acc;
      std::memcpy(&added, gradient + p * width, sizeof added);
      std::memcpy(&acc, buffer + p * width, sizeof acc);
      acc = (fresh ? Narrow{} : scale * acc) + added;
      std::memcpy(buffer + p * width, &acc, sizeof acc);
      const Wide x = __builtin_convertvector(acc, Wide);
      const Wide size = Wide(Bits(x) & largest_key<double>);
      sum.part[p] += x;
      squares.part[p] += x * x;
      magnitudes.part[p] += size;
      largest.part[p] = size > largest.part[p] ? size : largest.part[p];
    }
  }
};

template <std::size_t width, bool fresh, class Real>
HVS_INLINE Sums measure_lanes_as(const Real* gradient, Real* buffer, std::size_t n, Real scale) {
  MomentLanes<width> all;
  std::size_t i = 0;
  for (; i + lanes_of_sums <= n; i += lanes_of_sums) all.template add<fresh>(gradient + i, buffer + i, scale);
  Real added[lanes_of_sums] = {}, acc[lanes_of_sums] = {};  // zeros after the last element change no sum
  std::copy_n(gradient + i, n - i, added);
  std::copy_n(buffer + i, n - i, acc);
  all.template add<fresh>(added, acc, scale);
  std::copy_n(acc, n - i, buffer + i);
  return {all.sum.sum(), all.squares.sum(), all.magnitudes.sum(), all.largest.largest()};
}

template <std::size_t width, class Real>
HVS_INLINE Sums measure_lanes(const Real* gradient, Real* buffer, std::size_t n, Real scale) {
  return scale == 0 ? measure_lanes_as<width, true>(gradient, buffer, n, scale)
                    : measure_lanes_as<width, false>(gradient, buffer, n, scale);
}

template <std::size_t width, class Real> HVS_INLINE void add_squares(const Real* elements, Lanes<width>& squares) {
  for (std::size_t p = 0; p < Lanes<width>::parts; ++p) {
    typename Vector<Real, width>::Type narrow;
    std::memcpy(&narrow, elements + p * width, sizeof narrow);
    const auto x = __builtin_convertvector(narrow, typename Vector<double, width>::Type);
    squares.part[p] += x * x;
  }
}

template <std::size_t width, class Real> HVS_INLINE double square_lanes(const Real* x, std::size_t n) {
  Lanes<width> squares;
  std::size_t i = 0;
  for (; i + lanes_of_sums <= n; i += lanes_of_sums) add_squares(x + i, squares);
  Real rest[lanes_of_sums] = {};
  std::copy_n(x + i, n - i, rest);
  add_squares(rest, squares);
  return squares.sum();
}

template <std::size_t width, class Real> struct TailLanes {
  using Keys = typename Vector<Key<Real>, width>::Type;
  Lanes<width> magnitudes;
  Keys below[Lanes<width>::parts] = {};  // true is -1

  // Adds one element per lane; those below the threshold as zeros, which change no sum.
  HVS_INLINE void add(const Real* x, Real low) {
    using Reals = typename Vector<Real, width>::Type;
    for (std::size_t p = 0; p < Lanes<width>::parts; ++p) {
      Keys bits;
      std::memcpy(&bits, x + p * width, sizeof bits);
      bits &= largest_key<Real>;
      const Keys less = Reals(bits) < low;
      below[p] += less;
      magnitudes.part[p] += __builtin_convertvector(Reals(bits & ~less), typename Vector<double, width>::Type);
    }
  }
};

template <std::size_t width, class Real> HVS_INLINE Tail tail_lanes(const Real* x, std::size_t n, Real low) {
  TailLanes<width, Real> all;
  std::size_t i = 0;
  for (; i + lanes_of_sums <= n; i += lanes_of_sums) all.add(x + i, low);
  Real rest[lanes_of_sums] = {};
  std::copy_n(x + i, n - i, rest);
  all.add(rest, low);
  // The zeros after the last element reach a threshold of zero only.
  std::int64_t count = std::int64_t(low > 0 ? i + lanes_of_sums : n);
  for (const auto& part : all.below) {
    for (std::size_t k = 0; k < width; ++k) count += part[k];
  }
  return {count, all.magnitudes.sum()};
}

// Counts the elements of all full vectors; returns their number.
template <std::size_t width, class Real>
HVS_INLINE std::size_t count_vectors(const Real* x, std::size_t n, const Real* low, std::int64_t* counts) {
  using Reals = typename Vector<Real, width>::Type;
  using Keys = typename Vector<Key<Real>, width>::Type;
  Keys found[thresholds_at_once] = {};
  std::size_t i = 0;
  for (; i + width <= n; i += width) {
    Keys bits;
    std::memcpy(&bits, x + i, sizeof bits);
    const Reals size = Reals(bits & largest_key<Real>);
    for (std::size_t j = 0; j < thresholds_at_once; ++j) found[j] += size < low[j];  // true is -1
  }
  for (std::size_t j = 0; j < thresholds_at_once; ++j) {
    counts[j] += std::int64_t(i);
    for (std::size_t k = 0; k < width; ++k) counts[j] += found[j][k];
  }
  return i;
}

// Compares numbers, not keys: SSE2 has no comparison of 64-bit integers. Elements that are not below a threshold reach
// it, including NaN.
template <std::size_t width, class Real>
HVS_INLINE void count_reaching(const Real* x, std::size_t n, const Real* low, std::int64_t* counts) {
  for (std::size_t i = count_vectors<width>(x, n, low, counts); i < n; ++i) {
    for (std::size_t j = 0; j < thresholds_at_once; ++j) counts[j] += !(std::fabs(x[i]) < low[j]);
  }
}

}  // namespace hvs
