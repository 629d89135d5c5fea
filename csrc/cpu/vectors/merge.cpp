// merge_sum: merges two sparse vectors; adds more than two in a dense block of the index space that stays in the cache.
#include <algorithm>
#include <array>

#include "simd/level.hpp"
#include "vectors/pair.hpp"
#include "vectors/vectors.hpp"
#include "workspace.hpp"

namespace hvs {
namespace {

constexpr std::size_t block = 1 << 14;  // positions

template <class Real> struct Accumulator {
  Real* sums;                                   // block elements, all neutral between blocks
  std::array<std::uint64_t, block / word> set;  // bitmap of the elements that have an entry
};

// Adds the entries of a vector from `at` on whose index is below `end`; returns the first entry whose index is not.
template <class Real>
std::size_t add_block(Accumulator<Real>& acc, const Sparse<Real>& vector, std::size_t at, std::size_t begin,
                      std::size_t end) {
  for (; at < vector.count && std::size_t(vector.indices[at]) < end; ++at) {
    const std::size_t i = std::size_t(vector.indices[at]) - begin;
    acc.sums[i] += vector.values[at];
    acc.set[i / word] |= std::uint64_t(1) << i % word;
  }
  return at;
}

// Moves the sums out, in order; returns their number.
template <class Real>
std::size_t drain(Accumulator<Real>& acc, std::size_t begin, std::int32_t* indices, Real* values) {
  const std::size_t count = loops<Real>().list_bits(acc.set.data(), acc.set.size(), begin, indices);
  for (std::size_t i = 0; i < count; ++i) {
    Real& sum = acc.sums[std::size_t(indices[i]) - begin];
    values[i] = sum;
    sum = neutral<Real>;
  }
  acc.set.fill(0);
  return count;
}

// The lowest remaining index, or `size`.
template <class Real>
std::size_t next_index(const std::vector<Sparse<Real>>& vectors, const std::vector<std::size_t>& at, std::size_t size) {
  for (std::size_t v = 0; v < vectors.size(); ++v) {
    if (at[v] < vectors[v].count) size = std::min(size, std::size_t(vectors[v].indices[at[v]]));
  }
  return size;
}

template <class Real>
std::size_t merge_blocks(const std::vector<Sparse<Real>>& vectors, std::size_t size, std::int32_t* indices,
                         Real* values) {
  Lease scratch(workspaces());
  Accumulator<Real> acc{(*scratch).get<Real>(0, block), {}};
  std::fill_n(acc.sums, block, neutral<Real>);
  std::vector<std::size_t> at(vectors.size());
  std::size_t count = 0;
  for (std::size_t begin; (begin = next_index(vectors, at, size)) < size;) {
    for (std::size_t v = 0; v < vectors.size(); ++v) at[v] = add_block(acc, vectors[v], at[v], begin, begin + block);
    count += drain(acc, begin, indices + count, values + count);
  }
  return count;
}

}  // namespace

template <class Real>
std::size_t merge_sum(const std::vector<Sparse<Real>>& vectors, std::size_t size, std::size_t room,
                      std::int32_t* indices, Real* values) {
  const Sparse<Real> none = {nullptr, nullptr, 0};
  if (vectors.size() == 1) return merge_pair(vectors[0], none, room, indices, values);
  if (vectors.size() == 2) return merge_pair(vectors[0], vectors[1], room, indices, values);
  return merge_blocks(vectors, size, indices, values);
}

template std::size_t merge_sum(const std::vector<Sparse<float>>&, std::size_t, std::size_t, std::int32_t*, float*);
template std::size_t merge_sum(const std::vector<Sparse<double>>&, std::size_t, std::size_t, std::int32_t*, double*);

}  // namespace hvs
