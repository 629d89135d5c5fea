// The inner loops, with one version per SIMD level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../common/bits.hpp"
#include "../common/velocity.hpp"

namespace hvs {

// Loops store full vectors, so up to this many meaningless entries may follow what they append.
constexpr std::size_t padding = 16;

constexpr std::size_t word = 64;  // bits per word of a bitmap

// Entries in ascending order of index.
template <class Real> struct Entries {
  std::int32_t* indices;
  Real* values;
  std::size_t count;
};

// The keys above `above` and up to `upto`.
template <class Key> struct Range {
  Key above, upto;
};

// Sums over acc, or over part of it.
struct Sums {
  double sum, squares, magnitudes;
  double largest;  // largest magnitude, ignoring NaN
};

// Some of the magnitudes.
struct Tail {
  std::int64_t count;
  double magnitudes;
};

constexpr std::size_t thresholds_at_once = 8;

// gradient and buffer point to n elements; acc = scale * buffer + gradient. scale == 0 ignores the buffer's content. A
// key reaches a threshold if it is at least the threshold.
template <class Real> struct Loops {
  // Converts n adjacent float16 numbers, of any alignment.
  void (*widen_halves)(const char* halves, std::size_t n, Real* out);
  // buffer <- acc
  void (*accumulate)(const Real* gradient, Real* buffer, std::size_t n, Real scale);
  // values <- u, as ``Velocity``. `added` is `values` or a separate array, which gets what is to be added.
  void (*update_velocity)(const Real* gradient, Real* values, std::size_t n, const Velocity<Real>& how, Real* added);
  // buffer <- acc; returns its sums, with the same bits at every level.
  Sums (*measure)(const Real* gradient, Real* buffer, std::size_t n, Real scale);
  // The sum of squares, with the same bits at every level.
  double (*square)(const Real* x, std::size_t n);
  // The number n < 2^31 and the sum of the magnitudes that reach `low`, with the same bits at every level; NaN does.
  Tail (*tail)(const Real* x, std::size_t n, Real low);
  // Adds to each of thresholds_at_once counts the number of the n < 2^31 magnitudes that reach its `low`; NaN does.
  void (*count)(const Real* x, std::size_t n, const Real* low, std::int64_t* counts);
  // buffer <- acc; writes first + i where the key of acc reaches `low`. Returns the number of indices written.
  std::size_t (*scan)(const Real* gradient, Real* buffer, std::size_t n, Real scale, Key<Real> low, std::int32_t first,
                      std::int32_t* indices);
  // Like scan, but acc is computed from `source`, and stores bypass the cache: buffer <- acc, but 0 where the key of
  // acc is above `most`; writes first + i where it is above `below`. Returns the number of indices written.
  std::size_t (*scan_apart)(const Real* gradient, const Real* source, Real* buffer, std::size_t n, Real scale,
                            Key<Real> below, Key<Real> most, std::int32_t first, std::int32_t* indices);
  // Appends the entries first .. last of `from` whose key is in the range; `to` holds up to `room` entries.
  void (*filter)(const Entries<Real>& from, std::size_t first, std::size_t last, Range<Key<Real>> range,
                 Entries<Real>& to, std::size_t room);
  // Writes first + i for each bit i that is set in the words. Returns the number of indices written.
  std::size_t (*list_bits)(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* indices);
};

extern const Loops<float> portable_float, avx2_float, avx512_float;
extern const Loops<double> portable_double;

// The loops of the current level; double has only the portable ones.
template <class Real> const Loops<Real>& loops();

enum class Simd { portable, avx2, avx512 };

// The current level.
Simd simd();

// The name of the current level: "avx512", "avx2" or "portable".
std::string simd_level();

// Sets the level for the entire process; an empty name selects the best level that this machine supports.
// Throws std::invalid_argument for an unknown name and for an unsupported level.
void use_simd(const std::string& level);

}  // namespace hvs
