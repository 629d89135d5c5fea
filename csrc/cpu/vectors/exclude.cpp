// exclude and reaching: the entries of a sparse vector that remain. exclude marks the excluded positions, block by
// block, in memory that stays in the L1 cache.
#include <array>
#include <cmath>

#include "vectors/vectors.hpp"

namespace hvs {
namespace {

constexpr std::size_t block = 1 << 14;  // positions

// Bytes instead of bits: marking a position does not read the marks of its neighbours.
using Marks = std::array<bool, block>;

// Sets the marks of the ascending indices below begin + block; returns the number of these indices.
std::size_t mark(Marks& marks, const std::int32_t* indices, std::size_t count, std::size_t begin, bool value) {
  std::size_t i = 0;
  for (; i < count && std::size_t(indices[i]) < begin + block; ++i) marks[std::size_t(indices[i]) - begin] = value;
  return i;
}

}  // namespace

template <class Real>
std::size_t exclude(const Sparse<Real>& vector, const std::int32_t* others, std::size_t count, std::int32_t* indices,
                    Real* values) {
  const Sparse<Real> from = vector;
  Marks marks{};
  std::size_t kept = 0;
  for (std::size_t at = 0; at < from.count;) {
    const auto begin = std::size_t(from.indices[at]);
    for (; count > 0 && std::size_t(*others) < begin; --count) ++others;
    const std::size_t marked = mark(marks, others, count, begin, true);
    for (; at < from.count && std::size_t(from.indices[at]) < begin + block; ++at) {
      indices[kept] = from.indices[at];
      values[kept] = from.values[at];
      kept += !marks[std::size_t(from.indices[at]) - begin];
    }
    mark(marks, others, marked, begin, false);
    others += marked;
    count -= marked;
  }
  return kept;
}

template <class Real>
std::size_t reaching(const Sparse<Real>& vector, double threshold, std::int32_t* indices, Real* values) {
  const auto least = Real(threshold);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < vector.count; ++i) {
    indices[kept] = vector.indices[i];
    values[kept] = vector.values[i];
    kept += std::abs(vector.values[i]) >= least;
  }
  return kept;
}

template std::size_t exclude(const Sparse<float>&, const std::int32_t*, std::size_t, std::int32_t*, float*);
template std::size_t exclude(const Sparse<double>&, const std::int32_t*, std::size_t, std::int32_t*, double*);
template std::size_t reaching(const Sparse<float>&, double, std::int32_t*, float*);
template std::size_t reaching(const Sparse<double>&, double, std::int32_t*, double*);

}  // namespace hvs
