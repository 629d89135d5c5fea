// The instruction sets that can be compiled.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define HVS_X86 1
#define HVS_AVX2 __attribute__((target("avx2,bmi,f16c,popcnt")))
#define HVS_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt")))
#else
#define HVS_X86 0
#endif

// A loop that is written once is compiled for a level by inlining it into a function with that target (dispatch.hpp).
#define HVS_INLINE inline __attribute__((always_inline))

// Goes before a loop over a few elements: otherwise GCC unrolls it completely and does not vectorise it.
#define HVS_KEEP_LOOP _Pragma("GCC unroll 1")
