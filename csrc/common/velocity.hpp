// Momentum before the selection: u <- momentum * u + share * gradient. Instead of the gradient, u is added, or with
// Nesterov momentum gradient + momentum * u. Products and sums are rounded separately.
#pragma once

#include "portable.hpp"

namespace hvs {

template <class Real> struct Velocity {
  Real* values = nullptr;  // u at every position of the bucket; null: gradients are added unchanged
  Real momentum = 0, share = 0;
  bool nesterov = false;

  HVS_FUNCTION Real updated(Real u, Real gradient) const { return momentum * u + share * gradient; }
  // Takes the updated u.
  HVS_FUNCTION Real added(Real u, Real gradient) const { return nesterov ? gradient + momentum * u : u; }
};

}  // namespace hvs
