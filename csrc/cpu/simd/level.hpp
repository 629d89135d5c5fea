// The inner loops, in one version per SIMD level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../common/bits.hpp"

namespace hvs {

// Loops store whole vectors: what they append may be followed by this many entries without meaning.
constexpr std::size_t padding = 16;

constexpr std::size_t word = 64;  // bits; bitmaps are made of words

// Entries in ascending order of index.
template <class Real> struct Entries {
  std::int32_t* indices;
  Real* values;
  std::size_t count;
};

// Keys above `above`, up to `upto`.
template <class Key> struct Range {
  Key above, upto;
};

// Of acc, or of part of it.
struct Sums {
  double sum, squares, magnitudes;
  double largest;  // magnitude, NaN aside
};

constexpr std::size_t thresholds_at_once = 8;

// gradient and buffer point to n elements; acc = scale * buffer + gradient. scale == 0 ignores the buffer's content.
template <class Real> struct Loops {
  // Converts n adjacent float16 numbers, of any alignment.
  void (*widen_halves)(const char* halves, std::size_t n, Real* out);
  // buffer <- acc
  void (*accumulate)(const Real* gradient, Real* buffer, std::size_t n, Real scale);
  // velocity <- u = momentum * velocity + share * gradient; `added` <- u if it is the velocity, gradient + momentum * u
  // if it is an array of its own.
  void (*update_velocity)(const Real* gradient, Real* velocity, std::size_t n, Real momentum, Real share, Real* added);
  // buffer <- acc; returns its sums, the same bits at every level
  Sums (*measure)(const Real* gradient, Real* buffer, std::size_t n, Real scale);
  // The sum of squares, the same bits at every level.
  double (*square)(const Real* x, std::size_t n);
  // Adds to each of thresholds_at_once counts how many of the n < 2^31 magnitudes reach its `low`, as NaN does.
  void (*count)(const Real* x, std::size_t n, const Real* low, std::int64_t* counts);
  // buffer <- acc; writes first + i where the magnitude of acc reaches `low`. Returns how many.
  std::size_t (*scan)(const Real* gradient, Real* buffer, std::size_t n, Real scale, Key<Real> low, std::int32_t first,
                      std::int32_t* indices);
  // buffer <- acc of another array, `source`, past the cache, but 0 where its magnitude is above `most`; writes first + i
  // where it is above `below`. Returns how many.
  std::size_t (*scan_apart)(const Real* gradient, const Real* source, Real* buffer, std::size_t n, Real scale,
                            Key<Real> below, Key<Real> most, std::int32_t first, std::int32_t* indices);
  // Appends the entries first .. last of `from` whose magnitude is in the range; `to` has room for `room` entries.
  void (*filter)(const Entries<Real>& from, std::size_t first, std::size_t last, Range<Key<Real>> range,
                 Entries<Real>& to, std::size_t room);
  // Writes first + i for each bit i that is set in the words. Returns how many.
  std::size_t (*list_bits)(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* indices);
};

extern const Loops<float> portable_float, avx2_float, avx512_float;
extern const Loops<double> portable_double;

// The loops of the current level; double has the portable ones only.
template <class Real> const Loops<Real>& loops();

enum class Simd { portable, avx2, avx512 };

// The current level.
Simd simd();

// Its name: "avx512", "avx2" or "portable".
std::string simd_level();

// Sets the level for the whole process; an empty name means the best that this machine has.
// Throws std::invalid_argument for an unknown name and for a level that this machine lacks.
void use_simd(const std::string& level);

}  // namespace hvs
