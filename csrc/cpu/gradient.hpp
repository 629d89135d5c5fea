// Gradient tensors as passed by the caller: any of four formats, any stride, any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../common/bits.hpp"
#include "../common/half.hpp"
#include "../common/velocity.hpp"

namespace hvs {

enum class Format { float32, float16, bfloat16, float64 };

// A flat tensor that covers the positions start .. start + length of its bucket.
struct Tensor {
  std::size_t start;
  std::size_t length;
  char* data;
  std::ptrdiff_t stride;  // bytes from one element to the next; may be negative or zero
  Format format;

  std::size_t stop() const { return start + length; }
};

// Arguments of accumulate: buffer <- scale * source, plus the gradients. The tensors are ascending and disjoint.
// Positions between them are held: they are scaled, but neither added to nor selected from.
template <class Real> struct Step {
  Real* buffer;
  const Real* source;  // the buffer itself, or a separate array
  std::size_t size;
  Real scale;
  std::vector<Tensor> gradients;
  bool clear = false;  // set the gradients, which must be contiguous, to zero afterwards
  Velocity<Real> velocity = {};

  std::size_t active() const {
    std::size_t total = 0;
    for (const Tensor& gradient : gradients) total += gradient.length;
    return total;
  }
};

inline std::size_t bytes_of(Format format) {
  return format == Format::float64 ? 8 : format == Format::float32 ? 4 : 2;
}

// Returns acc. Product and sum are rounded separately; scale 0 ignores `old`.
template <class Real> inline Real accumulated(Real old, Real added, Real scale) {
  return (scale == 0 ? Real(0) : scale * old) + added;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

template <class Stored, class Real>
inline void load_strided(const char* data, std::ptrdiff_t stride, std::size_t count, Real* out) {
  for (std::size_t i = 0; i < count; ++i) {
    Stored x;
    std::memcpy(&x, data + std::ptrdiff_t(i) * stride, sizeof x);
    out[i] = Real(widen(x));
  }
}

// load_strided with a constant stride, which compilers vectorise.
template <class Stored, class Real> inline void load_adjacent(const char* data, std::size_t count, Real* out) {
  load_strided<Stored>(data, sizeof(Stored), count, out);
}

template <class Stored, class Real>
inline void load_as(const char* data, std::ptrdiff_t stride, std::size_t count, Real* out) {
  if (stride == std::ptrdiff_t(sizeof(Stored))) {
    load_adjacent<Stored>(data, count, out);
  } else {
    load_strided<Stored>(data, stride, count, out);
  }
}

// Loads elements first .. first + count of a tensor, converted to Real.
template <class Real> inline void load(const Tensor& t, std::size_t first, std::size_t count, Real* out) {
  const char* data = t.data + std::ptrdiff_t(first) * t.stride;
  switch (t.format) {
    case Format::float32: return load_as<float>(data, t.stride, count, out);
    case Format::float16: return load_as<Half>(data, t.stride, count, out);
    case Format::bfloat16: return load_as<BFloat16>(data, t.stride, count, out);
    case Format::float64: return load_as<double>(data, t.stride, count, out);
  }
}

// The tensor's elements if they can be read in place as aligned, contiguous Reals; otherwise null.
template <class Real> inline const Real* in_place(const Tensor& t) {
  constexpr Format own = std::is_same_v<Real, float> ? Format::float32 : Format::float64;
  const bool contiguous = t.stride == std::ptrdiff_t(sizeof(Real)) || t.length == 1;
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % alignof(Real) == 0;
  return t.format == own && contiguous && aligned ? reinterpret_cast<const Real*>(t.data) : nullptr;
}

}  // namespace hvs
