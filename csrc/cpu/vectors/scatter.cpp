// What is done with one sparse vector and dense arrays.
#include <algorithm>
#include <cstring>

#include "vectors/vectors.hpp"

namespace hvs {
namespace {

constexpr std::size_t tile = 8192;  // elements of an output that are zeroed and filled while they are in the cache

inline void store(float x, float& out) { out = x; }
inline void store(double x, float& out) { out = float(x); }
inline void store(float x, double& out) { out = x; }
inline void store(double x, double& out) { out = x; }
template <class Real> inline void store(Real x, Half& out) { out = to_half(float(x)); }
template <class Real> inline void store(Real x, BFloat16& out) { out = to_bfloat16(float(x)); }

template <class Stored, class Real> inline void write(char* data, std::size_t i, Real x) {
  Stored converted;
  store(x, converted);
  std::memcpy(data + i * sizeof converted, &converted, sizeof converted);
}

template <class Stored, class Real> void scatter_dense(const Real* values, const Tensor& out, Real scale) {
  for (std::size_t i = 0; i < out.length; ++i) write<Stored>(out.data, i, values[out.start + i] * scale);
}

// Starts at entry `at` of the vector; returns the first entry behind the output.
template <class Stored, class Real>
std::size_t scatter_sparse(const Sparse<Real>& vector, std::size_t at, const Tensor& out, Real scale) {
  for (std::size_t begin = out.start; begin < out.stop(); begin += tile) {
    const std::size_t end = std::min(begin + tile, out.stop());
    std::memset(out.data + (begin - out.start) * sizeof(Stored), 0, (end - begin) * sizeof(Stored));
    for (; at < vector.count && std::size_t(vector.indices[at]) < end; ++at) {
      write<Stored>(out.data, std::size_t(vector.indices[at]) - out.start, vector.values[at] * scale);
    }
  }
  return at;
}

template <class Stored, class Real>
void scatter_as(const Sparse<Real>& vector, std::size_t& at, const Tensor& out, Real scale) {
  if (!vector.indices) return scatter_dense<Stored>(vector.values, out, scale);
  const std::int32_t* const end = vector.indices + vector.count;
  at = std::size_t(std::lower_bound(vector.indices + at, end, std::int32_t(out.start)) - vector.indices);
  at = scatter_sparse<Stored>(vector, at, out, scale);
}

}  // namespace

template <class Real> void scatter(const Sparse<Real>& vector, const std::vector<Tensor>& outputs, Real scale) {
  std::size_t at = 0;
  for (const Tensor& out : outputs) {
    switch (out.format) {
      case Format::float32: scatter_as<float>(vector, at, out, scale); break;
      case Format::float16: scatter_as<Half>(vector, at, out, scale); break;
      case Format::bfloat16: scatter_as<BFloat16>(vector, at, out, scale); break;
      case Format::float64: scatter_as<double>(vector, at, out, scale); break;
    }
  }
}

template <class Real> void add(const Sparse<Real>& vector, Real* buffer) {
  if (vector.indices) {
    for (std::size_t i = 0; i < vector.count; ++i) buffer[vector.indices[i]] += vector.values[i];
  } else {
    for (std::size_t i = 0; i < vector.count; ++i) buffer[i] += vector.values[i];
  }
}

template void scatter(const Sparse<float>&, const std::vector<Tensor>&, float);
template void scatter(const Sparse<double>&, const std::vector<Tensor>&, double);
template void add(const Sparse<float>&, float*);
template void add(const Sparse<double>&, double*);

}  // namespace hvs
