// Moving given positions out of a buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradient.hpp"

namespace hvs {

// values <- buffer at the `count` ascending positions (nullptr: at 0 .. count), which becomes zero there. Positions that
// no tensor covers are held: they stay, and their value is zero.
template <class Real>
void take(const std::vector<Tensor>& tensors, const std::int32_t* positions, std::size_t count, Real* buffer,
          Real* values);

}  // namespace hvs
