// The sum of two sparse vectors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/bits.hpp"
#include "sparse.hpp"

namespace hvs {

// -0.0 is the neutral element of addition: -0.0 + x has the bits of x for every x, but 0.0 + x does not for x = -0.0.
template <class Real> constexpr Real neutral = Real(-0.0);

// merge_sum of two vectors.
template <class Real>
std::size_t merge_pair(const Sparse<Real>& a, const Sparse<Real>& b, std::size_t room, std::int32_t* indices,
                       Real* values);

}  // namespace hvs
