// accumulate and select, the fused step of error feedback; and other kernels that take entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradient.hpp"
#include "simd/level.hpp"
#include "sparse.hpp"
#include "workspace.hpp"

namespace hvs {

// buffer <- scale * source, plus the gradients.
template <class Real> void accumulate(const Step<Real>& step, std::size_t threads);

// accumulate, then moves the k largest magnitudes of the active positions (k <= active; ties: lower position first)
// from the buffer, which becomes zero there, to indices (ascending) and values.
template <class Real>
void select(const Step<Real>& step, std::size_t k, std::size_t threads, std::int32_t* indices, Real* values);

// --- above.cpp: all magnitudes that reach a threshold, in one pass over gradients and buffer

// Accumulates, and moves the active positions whose key reaches `low` out of the buffer, which becomes zero there.
// Returns the entries in order: one piece per thread, in memory of `scratch`. Throws std::bad_alloc if that memory runs
// out; the buffer then holds all of acc.
template <class Real>
std::vector<Entries<Real>> take_above(const Step<Real>& step, Key<Real> low, std::size_t threads, Workspace& scratch);

// Puts the entries of take_above back into the buffer.
template <class Real> void put_back(const std::vector<Entries<Real>>& pieces, Real* buffer);

// --- cut.cpp, take.cpp

// Splits the vector into the k largest magnitudes (k <= count; ties: the entry that comes first) and the rest, in
// order. `largest` holds up to k + 1 entries and `rest` up to count - k + 1; both are empty at the start.
template <class Real>
void cut(const Sparse<Real>& vector, std::size_t k, Entries<Real>& largest, Entries<Real>& rest);

// values <- buffer at the `count` ascending positions (nullptr: 0 .. count), and sets the buffer to zero there.
// Positions that no tensor covers keep their buffer entry and get the value zero.
template <class Real>
void take(const std::vector<Tensor>& tensors, const std::int32_t* positions, std::size_t count, Real* buffer,
          Real* values);

}  // namespace hvs
