// Conversions between float32 and the 16-bit formats of the wire.
#include "../common/half.hpp"
#include "simd/dispatch.hpp"
#include "simd/level.hpp"
#include "vectors/vectors.hpp"

namespace hvs {
namespace {

template <class Stored> HVS_INLINE Stored stored(float x);
template <> HVS_INLINE Half stored<Half>(float x) { return to_half(x); }
template <> HVS_INLINE BFloat16 stored<BFloat16>(float x) { return to_bfloat16(x); }

// The largest finite numbers.
template <class Stored> constexpr float largest;
template <> constexpr float largest<Half> = 65504.0f;
template <> constexpr float largest<BFloat16> = 0x1.fep127f;

template <class Stored> struct Narrow {
  static HVS_INLINE void run(const float* values, std::size_t count, Stored* __restrict out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = stored<Stored>(values[i]);
  }
};

struct Widen {
  static HVS_INLINE void run(const BFloat16* values, std::size_t count, float* __restrict out) {
    for (std::size_t i = 0; i < count; ++i) out[i] = widen(values[i]);
  }
};

template <class Stored> struct Round {
  static HVS_INLINE void run(const float* values, std::size_t count, float* __restrict rounded,
                             float* __restrict error) {
    for (std::size_t i = 0; i < count; ++i) {
      const float x = values[i];
      const float within = x > largest<Stored> ? largest<Stored> : x < -largest<Stored> ? -largest<Stored> : x;
      const float near = nearest<Stored>(within), left = x - near;
      const bool finite = x - x == 0, exact = x - left == near;
      rounded[i] = !finite ? x : exact ? near : 0.0f;
      error[i] = !finite ? 0.0f : exact ? left : x;
    }
  }
};

}  // namespace

template <class Stored> void narrow(const float* values, std::size_t count, Stored* out) {
  run_at_level<Narrow<Stored>>(values, count, out);
}

template <> void widen_all(const Half* values, std::size_t count, float* out) {
  loops<float>().widen_halves(reinterpret_cast<const char*>(values), count, out);  // an instruction of the processor
}

template <> void widen_all(const BFloat16* values, std::size_t count, float* out) {
  run_at_level<Widen>(values, count, out);
}

template <class Stored> void round_values(const float* values, std::size_t count, float* rounded, float* error) {
  run_at_level<Round<Stored>>(values, count, rounded, error);
}

template void narrow(const float*, std::size_t, Half*);
template void narrow(const float*, std::size_t, BFloat16*);
template void round_values<Half>(const float*, std::size_t, float*, float*);
template void round_values<BFloat16>(const float*, std::size_t, float*, float*);

}  // namespace hvs
