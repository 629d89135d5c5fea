// What the threshold sparsifiers ask of a bucket before they choose what leaves it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradient.hpp"
#include "simd/level.hpp"

namespace hvs {

// accumulate, and the sums of the active positions; where one of them is NaN, so is the largest magnitude.
template <class Real> Sums accumulate_moments(const Step<Real>& step, std::size_t threads);

// How many magnitudes of the buffer reach each `low`, at the positions that the tensors cover.
template <class Real>
std::vector<std::int64_t> count_reaching(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors,
                                         const std::vector<Real>& low, std::size_t threads);

// The sum of squares of all elements.
double square_norm(const std::vector<Tensor>& tensors);

// The sum of squares in each run of `block` positions, at those that the tensors cover; the last run may be shorter.
// Of every tile_size positions of a block, number i goes to lane i % 8; the sums of these tiles are added in order.
template <class Real>
void block_scores(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors, std::size_t block,
                  std::size_t threads, double* scores);

// How many active positions have a number start, start + stride, ...
inline std::size_t sample_count(std::size_t active, std::size_t start, std::size_t stride) {
  return active > start ? (active - start - 1) / stride + 1 : 0;
}

// Writes what accumulate would leave there, in order.
template <class Real> void sample(const Step<Real>& step, std::size_t start, std::size_t stride, Real* values);

// The largest magnitude of all elements; infinity where one is not finite, and then not all have been looked at.
double largest(const std::vector<Tensor>& tensors);

}  // namespace hvs
