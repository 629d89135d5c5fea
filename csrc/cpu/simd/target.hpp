// Which instruction sets can be compiled in.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define HVS_X86 1
#define HVS_AVX2 __attribute__((target("avx2,bmi,f16c,popcnt")))
#define HVS_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt")))
#else
#define HVS_X86 0
#endif

// Loops that are written once are compiled for a level by being inlined into a function of that target (dispatch.hpp).
#define HVS_INLINE inline __attribute__((always_inline))

// Before a loop over a few elements: GCC unrolls it completely otherwise, and then vectorises it no more.
#define HVS_KEEP_LOOP _Pragma("GCC unroll 1")
