// Definitions that the headers of this folder need on the host and in NVRTC, which has no standard headers.
#pragma once

#if defined(__CUDACC_RTC__)

#define HVS_FUNCTION __device__ __forceinline__

namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));
}  // namespace std

#else

#include <cstddef>
#include <cstdint>
#include <cstring>

#define HVS_FUNCTION inline __attribute__((always_inline))

#endif

namespace hvs {

// Reinterprets the bits as another type of the same size.
template <class To, class From> HVS_FUNCTION To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace hvs
