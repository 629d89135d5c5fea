// The inner loops, in one version per SIMD level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "bits.hpp"

namespace hvs {

// Entries in ascending order of index. Appending may write up to `padding` entries beyond the count.
template <class Real> struct Entries {
  static constexpr std::size_t padding = 16;
  std::int32_t* indices;
  Real* values;
  std::size_t count;
};

// gradient and buffer point to n elements; acc = scale * buffer + gradient. scale == 0 ignores the buffer's content.
template <class Real> struct Loops {
  // buffer <- acc
  void (*accumulate)(const Real* gradient, Real* buffer, std::size_t n, Real scale);
  // buffer <- acc, 0 where its magnitude reaches bracket.guess. Where it reaches bracket.low, (first + i, acc) is
  // appended to the candidates.
  void (*sweep)(const Real* gradient, Real* buffer, std::size_t n, Real scale, Bracket<Key<Real>> bracket,
                std::int32_t first, Entries<Real>& candidates);
  // Appends the entries first .. last of `from` whose magnitude is above `limit`; `to` has room for `room` entries.
  void (*filter)(const Entries<Real>& from, std::size_t first, std::size_t last, Key<Real> limit, Entries<Real>& to,
                 std::size_t room);
};

extern const Loops<float> portable_float, avx2_float, avx512_float;
extern const Loops<double> portable_double;

// The loops of the current level; double has the portable ones only.
template <class Real> const Loops<Real>& loops();

// "avx512", "avx2" or "portable".
std::string simd_level();

// Sets the level for the whole process; an empty name means the best that this machine has.
// Throws std::invalid_argument for an unknown name and for a level that this machine lacks.
void use_simd(const std::string& level);

}  // namespace hvs
