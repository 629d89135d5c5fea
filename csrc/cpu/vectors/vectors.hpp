// Sums of sparse vectors, and operations on one sparse vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradient.hpp"
#include "simd/level.hpp"
#include "sparse.hpp"

namespace hvs {

// The sum of the vectors, whose indices are all below `size`. Values of the same index are added in the order of the
// vectors. The sum has at most `room` entries; indices and values hold `padding` more. Returns the number of entries.
template <class Real>
std::size_t merge_sum(const std::vector<Sparse<Real>>& vectors, std::size_t size, std::size_t room,
                      std::int32_t* indices, Real* values);

// Copies the entries of the vector whose index is not among the `count` ascending others; indices and values hold all
// entries of the vector. Returns the number of entries copied.
template <class Real>
std::size_t exclude(const Sparse<Real>& vector, const std::int32_t* others, std::size_t count, std::int32_t* indices,
                    Real* values);

// Copies the entries whose magnitude is at least the threshold, rounded to Real; indices and values hold all entries of
// the vector. Returns the number of entries copied.
template <class Real>
std::size_t reaching(const Sparse<Real>& vector, double threshold, std::int32_t* indices, Real* values);

// outputs <- 0, unless they are `cleared` already, then values * scale at the vector's positions. Ignores positions
// outside all outputs.
template <class Real>
void scatter(const Sparse<Real>& vector, const std::vector<Tensor>& outputs, Real scale, bool cleared);

// Conversions to and from Half and BFloat16, as `narrow`, `widen` and `round_values` of kernels/protocol.py.
template <class Stored> void narrow(const float* values, std::size_t count, Stored* out);
template <class Stored> void widen_all(const Stored* values, std::size_t count, float* out);
template <class Stored> void round_values(const float* values, std::size_t count, float* rounded, float* error);

// buffer[indices] += values
template <class Real> void add(const Sparse<Real>& vector, Real* buffer);

}  // namespace hvs
