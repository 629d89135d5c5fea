// Loops of standard C++ that the compiler vectorises once per SIMD level.
#pragma once

#include "simd/level.hpp"
#include "simd/target.hpp"

namespace hvs {

#if HVS_X86
template <class Loop, class... Arguments> HVS_AVX512 void run_avx512(Arguments... arguments) {
  Loop::run(arguments...);
}
template <class Loop, class... Arguments> HVS_AVX2 void run_avx2(Arguments... arguments) { Loop::run(arguments...); }
#endif

// Calls Loop::run, which is HVS_INLINE like all that it calls, as compiled for the current level. Its bits do not depend
// on the level: the order of operations is the source's, and products and sums are never contracted.
template <class Loop, class... Arguments> void run_at_level(Arguments... arguments) {
  switch (simd()) {
#if HVS_X86
    case Simd::avx512: return run_avx512<Loop>(arguments...);
    case Simd::avx2: return run_avx2<Loop>(arguments...);
#endif
    default: return Loop::run(arguments...);
  }
}

}  // namespace hvs
