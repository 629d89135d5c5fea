// What tests force and ask of select, in builds with HOROVOD_SPARSE_TEST_HOOKS only (setup.py).
#pragma once

#include <cstddef>

namespace hvs::hooks {

// Thresholds (as magnitudes) and candidate capacity to use instead of sampled ones, so that the paths of a wrong guess
// run on purpose.
struct Forced {
  double low, guess, high;
  std::size_t capacity;
};

#ifdef HOROVOD_SPARSE_TEST_HOOKS
const Forced* forced();  // null: nothing is
void count_fallback();   // a sweep had to be followed by radix selection
#else
constexpr const Forced* forced() { return nullptr; }
inline void count_fallback() {}
#endif

}  // namespace hvs::hooks
