// accumulate and select, the fused step of error feedback; and other ways in which entries leave.
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

// accumulate, then the k largest magnitudes of the active positions (k <= active; ties: lower position first) move
// from the buffer, which keeps zeros, to indices (ascending) and values.
template <class Real>
void select(const Step<Real>& step, std::size_t k, std::size_t threads, std::int32_t* indices, Real* values);

// --- above.cpp: everything that reaches a given magnitude, in one pass over gradients and buffer

// Accumulates, and moves the active positions' magnitudes of at least `low` out of the buffer, which keeps zeros.
// Returns what left, in order: one piece per thread, in memory of `scratch`. Throws std::bad_alloc when that memory
// runs out; the buffer then holds acc, all of it.
template <class Real>
std::vector<Entries<Real>> take_above(const Step<Real>& step, Key<Real> low, std::size_t threads, Workspace& scratch);

// Puts entries back to where take_above found them.
template <class Real> void put_back(const std::vector<Entries<Real>>& pieces, Real* buffer);

// --- cut.cpp, take.cpp

// Parts the k largest magnitudes (k <= count; ties: the entry that comes first) from the rest. `largest` has room for
// k + 1 entries and `rest` for count - k + 1; both are empty and keep the order.
template <class Real>
void cut(const Sparse<Real>& vector, std::size_t k, Entries<Real>& largest, Entries<Real>& rest);

// values <- buffer at the `count` ascending positions (nullptr: at 0 .. count), which becomes zero there. Positions that
// no tensor covers are held: they stay, and their value is zero.
template <class Real>
void take(const std::vector<Tensor>& tensors, const std::int32_t* positions, std::size_t count, Real* buffer,
          Real* values);

}  // namespace hvs
