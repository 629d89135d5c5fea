// Momentum before the selection: u <- momentum * u + share * gradient. Instead of the gradient, fresh * gradient +
// weight * u is added; u itself if these factors are 0 and 1. Products and sums are rounded separately.
#pragma once

#include "portable.hpp"

namespace hvs {

template <class Real> struct Velocity {
  Real* values = nullptr;  // u at every position of the bucket; null: gradients are added unchanged
  Real momentum = 0, share = 0, fresh = 0, weight = 1;

  HVS_FUNCTION Real updated(Real u, Real gradient) const { return momentum * u + share * gradient; }
  // Takes the updated u.
  HVS_FUNCTION Real added(Real u, Real gradient) const { return alone() ? u : fresh * gradient + weight * u; }
  // Whether u is added unchanged.
  HVS_FUNCTION bool alone() const { return fresh == 0 && weight == 1; }
};

}  // namespace hvs
