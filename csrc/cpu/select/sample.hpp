// Estimate of the k-th largest magnitude of acc = scale * buffer + gradient from a sample.
//
// The sample is stratified: one cluster of adjacent elements from each of many equal parts of the active positions. A
// cluster costs as many cache misses as one element. It carries less information than the same number of independent
// elements, because entire rows or channels of a gradient can be large together. The loss is measured, and the bracket
// is widened accordingly.
#pragma once

#include <cstddef>

#include "gradient.hpp"
#include "workspace.hpp"

namespace hvs {

constexpr std::size_t cluster = 16;            // elements
constexpr std::size_t smallest_sampled = 512;  // active positions

// The number of clusters that represent `active` positions.
std::size_t cluster_count(std::size_t active);

// The begin of cluster j, in active positions; depends only on j and `active`.
std::size_t cluster_begin(std::size_t j, std::size_t active);

template <class Real> struct Estimate {
  Bracket<Key<Real>> bracket;  // of the k-th largest magnitude
  std::size_t candidates;      // upper bound, with near certainty, of the magnitudes that reach bracket.low
};

// Needs 0 < k < active and active >= smallest_sampled. Uses one block of the workspace.
template <class Real> Estimate<Real> estimate(const Step<Real>& step, std::size_t k, Workspace& scratch);

}  // namespace hvs
