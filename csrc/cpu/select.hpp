// accumulate and select: the fused step of error feedback.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "gradient.hpp"

namespace hvs {

// buffer <- scale * buffer, plus the gradients.
template <class Real> void accumulate(const Step<Real>& step, std::size_t threads);

// accumulate, then the k largest magnitudes of the active positions (k <= active; ties: lower position first) move
// from the buffer, which keeps zeros, to indices (ascending) and values.
template <class Real>
void select(const Step<Real>& step, std::size_t k, std::size_t threads, std::int32_t* indices, Real* values);

// For tests: thresholds (as magnitudes) and candidate capacity to use instead of sampled ones, so that the paths of a
// wrong guess run on purpose.
struct Forced {
  double low, guess, high;
  std::size_t capacity;
};
extern std::optional<Forced> forced;

// For tests: how often a sweep had to be followed by radix selection, since the process started.
std::size_t fallbacks();

}  // namespace hvs
