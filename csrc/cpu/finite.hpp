// Looking for infinities and NaNs.
#pragma once

#include <vector>

#include "gradient.hpp"

namespace hvs {

// Whether every element of every tensor is finite; stops at the first tile that has one that is not.
bool all_finite(const std::vector<Tensor>& tensors);

}  // namespace hvs
