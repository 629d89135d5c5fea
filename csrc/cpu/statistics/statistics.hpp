// Statistics of a bucket, which sparsifiers use before they select.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradient.hpp"
#include "simd/level.hpp"

namespace hvs {

// accumulate, and the sums over the active positions. The largest magnitude is NaN if any element is.
template <class Real> Sums accumulate_moments(const Step<Real>& step, std::size_t threads);

// The number of magnitudes of the buffer that reach each `low`, at positions that the tensors cover.
template <class Real>
std::vector<std::int64_t> count_reaching(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors,
                                         const std::vector<Real>& low, std::size_t threads);

// Number and sum of the magnitudes of the buffer that reach `low`, at positions that the tensors cover. Added in the
// order of accumulate_moments.
template <class Real>
Tail tail(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors, Real low, std::size_t threads);

// The sum of squares of all elements.
double square_norm(const std::vector<Tensor>& tensors);

// The sum of squares in each run of `block` positions, over positions that the tensors cover; the last run may be
// shorter. In each tile of a run, position i is added to lane i % 8; the sums of the tiles are added in order.
template <class Real>
void block_scores(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors, std::size_t block,
                  std::size_t threads, double* scores);

// The number of active positions with a number of start, start + stride, ...
inline std::size_t sample_count(std::size_t active, std::size_t start, std::size_t stride) {
  return active > start ? (active - start - 1) / stride + 1 : 0;
}

// Writes acc at these positions in order, as accumulate would store it.
template <class Real> void sample(const Step<Real>& step, std::size_t start, std::size_t stride, Real* values);

// The largest magnitude of all elements. Returns infinity if one is not finite, without reading all elements then.
double largest(const std::vector<Tensor>& tensors);

}  // namespace hvs
