// Streaming stores, which bypass the cache, for arrays larger than it: cache lines written completely are not read
// first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd/target.hpp"

#if HVS_X86
#include <emmintrin.h>
#endif

namespace hvs {

// Size in bytes from which an array would have left the cache before it is read next.
constexpr std::size_t streamed = std::size_t(4) << 20;

constexpr std::size_t line = 64;  // bytes of a cache line, which are written together

// The number of elements before the first cache line that begins at or after the pointer.
template <class Real> inline std::size_t elements_before_line(const Real* pointer) {
  return (line - reinterpret_cast<std::uintptr_t>(pointer) % line) % line / sizeof(Real);
}

// Copies bytes. `past`: bypasses the cache where the machine can; other threads see the bytes after end_stream().
inline void copy_bytes(const void* from, void* to, std::size_t bytes, bool past) {
#if HVS_X86
  constexpr std::size_t width = sizeof(__m128i);
  const auto* source = static_cast<const char*>(from);
  auto* target = static_cast<char*>(to);
  const std::size_t head = elements_before_line(target);
  if (past && bytes >= head + line) {
    std::memcpy(target, source, head);
    std::size_t i = head;
    for (; i + line <= bytes; i += line) {
      for (std::size_t j = i; j < i + line; j += width) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + j),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + j)));
      }
    }
    std::memcpy(target + i, source + i, bytes - i);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

inline void end_stream() {
#if HVS_X86
  _mm_sfence();
#endif
}

}  // namespace hvs
