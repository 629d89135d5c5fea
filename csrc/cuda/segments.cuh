// Gradient tensors of a bucket: a table in device memory that every kernel takes.
#pragma once

#include "../common/bits.hpp"
#include "../common/half.hpp"

namespace hvs {

enum Format { format_float32, format_float16, format_bfloat16, format_float64 };

// A contiguous tensor that covers the positions start .. start + length of its bucket.
struct Segment {
  char* data;
  std::int32_t start, length;
  std::int32_t before;  // active positions before it
  std::int32_t format;

  HVS_FUNCTION std::int32_t stop() const { return start + length; }
};

HVS_FUNCTION float widen(float x) { return x; }
HVS_FUNCTION double widen(double x) { return x; }

// Element i, converted to Real.
template <class Real> HVS_FUNCTION Real load(const Segment& segment, std::int64_t i) {
  switch (segment.format) {
    case format_float32: return Real(reinterpret_cast<const float*>(segment.data)[i]);
    case format_float16: return Real(widen(reinterpret_cast<const Half*>(segment.data)[i]));
    case format_bfloat16: return Real(widen(reinterpret_cast<const BFloat16*>(segment.data)[i]));
    default: return Real(reinterpret_cast<const double*>(segment.data)[i]);
  }
}

// Sets element i. Converts double to 16 bits through float, like the CPU kernels.
template <class Real> HVS_FUNCTION void store(const Segment& segment, std::int64_t i, Real x) {
  switch (segment.format) {
    case format_float32: reinterpret_cast<float*>(segment.data)[i] = float(x); break;
    case format_float16: reinterpret_cast<Half*>(segment.data)[i] = to_half(float(x)); break;
    case format_bfloat16: reinterpret_cast<BFloat16*>(segment.data)[i] = to_bfloat16(float(x)); break;
    default: reinterpret_cast<double*>(segment.data)[i] = double(x);
  }
}

// Number of the first segment that ends after a position; `count` if none does.
HVS_FUNCTION int first_behind(const Segment* segments, int count, std::int64_t position) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (segments[middle].stop() <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Number of the segment that contains active position `number`.
HVS_FUNCTION int holding_active(const Segment* segments, int count, std::int64_t number) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (segments[middle].before <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// scale * old + added; product and sum are rounded separately, and scale 0 ignores `old`, even NaN.
template <class Real> HVS_FUNCTION Real accumulated(Real old, Real added, Real scale) {
  return (scale == 0 ? Real(0) : scale * old) + added;
}

// The new value of a position without a gradient.
template <class Real> HVS_FUNCTION Real held(Real old, Real scale) { return scale == 0 ? Real(0) : scale * old; }

}  // namespace hvs
