// Exact top-k in one pass over gradients and buffer, given a good estimate of the k-th largest magnitude.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradient.hpp"
#include "workspace.hpp"

namespace hvs {

template <class Real> struct Plan {
  Bracket<Key<Real>> bracket;  // low <= guess
  std::size_t capacity;        // expected maximum number of candidates
  std::size_t threads;
};

// Accumulates and moves the k largest magnitudes to indices and values. Returns false if the bracket was wrong: the
// buffer then holds all of acc, and indices and values are undefined.
template <class Real>
bool sweep_select(const Step<Real>& step, std::size_t k, const Plan<Real>& plan, Workspace& scratch,
                  std::int32_t* indices, Real* values);

}  // namespace hvs
