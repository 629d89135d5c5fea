// Estimating the k-th largest magnitude of acc = scale * buffer + gradient from a sample.
#pragma once

#include <cstddef>

#include "gradient.hpp"
#include "workspace.hpp"

namespace hvs {

// How many of `active` positions are sampled.
std::size_t sample_size(std::size_t active);

// The position sampled in stratum j of count: one in each of count equal parts of 0 .. active, at a place that
// depends only on j.
std::size_t sample_position(std::size_t j, std::size_t count, std::size_t active);

// How many positions the sample lets expect at or above the bracket's low end, with near certainty.
std::size_t expected_candidates(std::size_t k, std::size_t active);

// A bracket of the k-th largest magnitude; 0 < k < active.
template <class Real> Bracket<Key<Real>> estimate(const Step<Real>& step, std::size_t k, Key<Real>* scratch);

}  // namespace hvs
