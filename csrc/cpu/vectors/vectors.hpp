// Sparse vectors: their sum, and what is done with one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradient.hpp"
#include "simd/level.hpp"
#include "sparse.hpp"

namespace hvs {

// The union of the vectors, whose indices are all below `size`; values of one index are added in the order of the
// vectors. `room` is at least what the union has; indices and values have room for `padding` more. Returns how many.
template <class Real>
std::size_t merge_sum(const std::vector<Sparse<Real>>& vectors, std::size_t size, std::size_t room,
                      std::int32_t* indices, Real* values);

// The entries of the vector whose index is not among the `count` ascending others; indices and values have room for
// all of them. Returns how many.
template <class Real>
std::size_t exclude(const Sparse<Real>& vector, const std::int32_t* others, std::size_t count, std::int32_t* indices,
                    Real* values);

// outputs <- 0, unless they are `cleared` already, then values * scale at the vector's positions; positions outside of
// every output are ignored.
template <class Real>
void scatter(const Sparse<Real>& vector, const std::vector<Tensor>& outputs, Real scale, bool cleared);

// buffer[indices] += values
template <class Real> void add(const Sparse<Real>& vector, Real* buffer);

}  // namespace hvs
