// Operations on one sparse vector and dense arrays.
#include <algorithm>
#include <cstring>

#include "stream.hpp"
#include "vectors/vectors.hpp"

namespace hvs {
namespace {

constexpr std::size_t tile = 2048;     // elements of an output that are composed in the L1 cache
constexpr std::size_t lookahead = 32;  // elements of an output whose cache misses overlap

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

// Writes zeros and the entries from `at` on; returns the first entry after the output.
template <class Stored, class Real>
std::size_t scatter_sparse(const Sparse<Real>& vector, std::size_t at, const Tensor& out, Real scale) {
  alignas(64) char made[tile * sizeof(Stored)] = {};
  const bool past = out.length * sizeof(Stored) >= streamed;
  for (std::size_t begin = out.start; begin < out.stop(); begin += tile) {
    const std::size_t first = at, end = std::min(begin + tile, out.stop());
    for (; at < vector.count && std::size_t(vector.indices[at]) < end; ++at) {
      write<Stored>(made, std::size_t(vector.indices[at]) - begin, vector.values[at] * scale);
    }
    copy_bytes(made, out.data + (begin - out.start) * sizeof(Stored), (end - begin) * sizeof(Stored), past);
    for (std::size_t i = first; i < at; ++i) write<Stored>(made, std::size_t(vector.indices[i]) - begin, Real(0));
  }
  if (past) end_stream();
  return at;
}

// The same for an output that already holds zeros.
template <class Stored, class Real>
std::size_t write_entries(const Sparse<Real>& vector, std::size_t at, const Tensor& out, Real scale) {
  const auto there = [&](std::size_t i) { return std::size_t(vector.indices[i]) - out.start; };
  for (; at < vector.count && std::size_t(vector.indices[at]) < out.stop(); ++at) {
    if (at + lookahead < vector.count) __builtin_prefetch(out.data + there(at + lookahead) * sizeof(Stored), 1);
    write<Stored>(out.data, there(at), vector.values[at] * scale);
  }
  return at;
}

template <class Stored, class Real>
void scatter_as(const Sparse<Real>& vector, std::size_t& at, const Tensor& out, Real scale, bool cleared) {
  if (!vector.indices) return scatter_dense<Stored>(vector.values, out, scale);
  const std::int32_t* const end = vector.indices + vector.count;
  at = std::size_t(std::lower_bound(vector.indices + at, end, std::int32_t(out.start)) - vector.indices);
  at = cleared ? write_entries<Stored>(vector, at, out, scale) : scatter_sparse<Stored>(vector, at, out, scale);
}

}  // namespace

template <class Real>
void scatter(const Sparse<Real>& vector, const std::vector<Tensor>& outputs, Real scale, bool cleared) {
  std::size_t at = 0;
  for (const Tensor& out : outputs) {
    switch (out.format) {
      case Format::float32: scatter_as<float>(vector, at, out, scale, cleared); break;
      case Format::float16: scatter_as<Half>(vector, at, out, scale, cleared); break;
      case Format::bfloat16: scatter_as<BFloat16>(vector, at, out, scale, cleared); break;
      case Format::float64: scatter_as<double>(vector, at, out, scale, cleared); break;
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

template void scatter(const Sparse<float>&, const std::vector<Tensor>&, float, bool);
template void scatter(const Sparse<double>&, const std::vector<Tensor>&, double, bool);
template void add(const Sparse<float>&, float*);
template void add(const Sparse<double>&, double*);

}  // namespace hvs
