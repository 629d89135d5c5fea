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

// Calls Loop::run as compiled for the current level; it and all that it calls must be HVS_INLINE. The bits do not
// depend on the level: operations keep the order of the source, and products and sums are never contracted.
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
