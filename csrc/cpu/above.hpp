// Everything that reaches a given magnitude, in one pass over gradients and buffer.
#pragma once

#include <cstddef>
#include <vector>

#include "gradient.hpp"
#include "level.hpp"
#include "workspace.hpp"

namespace hvs {

// Accumulates, and moves the active positions' magnitudes of at least `low` out of the buffer, which keeps zeros.
// Returns what left, in order: one piece per thread, in memory of `scratch`. Throws std::bad_alloc when that memory
// runs out; the buffer then holds acc, all of it.
template <class Real>
std::vector<Entries<Real>> take_above(const Step<Real>& step, Key<Real> low, std::size_t threads, Workspace& scratch);

// Puts entries back to where take_above found them.
template <class Real> void put_back(const std::vector<Entries<Real>>& pieces, Real* buffer);

}  // namespace hvs
