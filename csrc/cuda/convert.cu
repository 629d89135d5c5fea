// Conversion of values to the wire format and back.
#include "segments.cuh"

namespace hvs {

constexpr int block_threads = 256;
constexpr int batch = 4;  // elements per thread, block_threads apart, whose loads overlap

// Rounds toward zero, and makes the result odd if it is inexact. Rounding it again, to at least two bits fewer, gives
// the same as rounding x once.
HVS_FUNCTION float to_odd(double x) {
  const float nearest = float(x);
  if (double(nearest) == x || x != x) return nearest;
  const bool away = x < 0 ? double(nearest) < x : double(nearest) > x;
  return float_of((bits_of(nearest) - std::uint32_t(away)) | 1);
}

// Rounds to nearest even once, except from double to bfloat16, which goes through float as in ml_dtypes.
HVS_FUNCTION void convert(float x, Half& to) { to = to_half(x); }
HVS_FUNCTION void convert(float x, BFloat16& to) { to = to_bfloat16(x); }
HVS_FUNCTION void convert(double x, Half& to) { to = to_half(to_odd(x)); }
HVS_FUNCTION void convert(double x, BFloat16& to) { to = to_bfloat16(float(x)); }
HVS_FUNCTION void convert(double x, float& to) { to = float(x); }

// Calls work(i, position) for each element i of the thread.
template <class Work> HVS_FUNCTION void for_elements(std::int64_t size, Work work) {
  const std::int64_t first = std::int64_t(blockIdx.x) * (batch * block_threads) + std::int64_t(threadIdx.x);
  for (int i = 0; i < batch; ++i) {
    if (first + i * block_threads < size) work(i, first + i * block_threads);
  }
}

template <class Stored, class Real>
__global__ void __launch_bounds__(block_threads) narrow_all(const Real* values, Stored* message, std::int64_t size) {
  Real x[batch];
  for_elements(size, [&](int i, std::int64_t at) { x[i] = values[at]; });
  for_elements(size, [&](int i, std::int64_t at) { convert(x[i], message[at]); });
}

template <class Stored, class Real>
__global__ void __launch_bounds__(block_threads) widen_all(const Stored* message, Real* values, std::int64_t size) {
  Stored x[batch];
  for_elements(size, [&](int i, std::int64_t at) { x[i] = message[at]; });
  for_elements(size, [&](int i, std::int64_t at) { values[at] = Real(widen(x[i])); });
}

// Splits values into what the format holds and the rest. If the rest would have to be rounded, the entire value is
// rest; a non-finite value has no rest.
template <class Stored, class Real>
__global__ void __launch_bounds__(block_threads)
    round_all(const Real* values, std::int64_t size, Real largest, Real* rounded, Real* error) {
  Real x[batch];
  for_elements(size, [&](int i, std::int64_t at) { x[i] = values[at]; });
  for_elements(size, [&](int i, std::int64_t at) {
    const Real inside = x[i] < -largest ? -largest : x[i] > largest ? largest : x[i];
    Stored stored;
    convert(inside, stored);
    Real near = Real(widen(stored)), rest = x[i] - near;
    if (x[i] - rest != near) {
      const bool finite = x[i] - x[i] == 0;
      near = finite ? Real(0) : x[i];
      rest = finite ? x[i] : Real(0);
    }
    rounded[at] = near;
    error[at] = rest;
  });
}

}  // namespace hvs
