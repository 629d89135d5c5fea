// Exact top-k by radix selection: several passes over the buffer, for any distribution of magnitudes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradient.hpp"

namespace hvs {

// Moves the k largest magnitudes of the active positions of step.buffer (which holds acc already) to indices and
// values; 0 < k <= active. Faster when `guess` is the k-th largest; any key gives the same result.
template <class Real>
void exact_select(const Step<Real>& step, std::size_t k, Key<Real> guess, std::int32_t* indices, Real* values);

}  // namespace hvs
