// Hooks for the tests of select, only in builds with HOROVOD_SPARSE_TEST_HOOKS (setup.py).
#pragma once

#include <cstddef>

namespace hvs::hooks {

// Thresholds (as magnitudes) and candidate capacity that replace the sampled ones, so that tests can run the paths of a
// wrong guess.
struct Forced {
  double low, guess, high;
  std::size_t capacity;
};

#ifdef HOROVOD_SPARSE_TEST_HOOKS
const Forced* forced();  // null: nothing is forced
void count_fallback();   // counts a sweep that was followed by radix selection
#else
constexpr const Forced* forced() { return nullptr; }
inline void count_fallback() {}
#endif

}  // namespace hvs::hooks
