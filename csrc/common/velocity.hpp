// Momentum before the selection: u <- momentum * u + share * gradient, and u is added in the gradient's place, or what
// Nesterov adds, gradient + momentum * u. Products and sums are rounded separately.
#pragma once

#include "portable.hpp"

namespace hvs {

template <class Real> struct Velocity {
  Real* values = nullptr;  // u at every position of the bucket; null: gradients are added as they are
  Real momentum = 0, share = 0;
  bool nesterov = false;

  HVS_FUNCTION Real updated(Real u, Real gradient) const { return momentum * u + share * gradient; }
  // `u` is the new one.
  HVS_FUNCTION Real added(Real u, Real gradient) const { return nesterov ? gradient + momentum * u : u; }
};

}  // namespace hvs
