#include "select/select.hpp"

#include <algorithm>

namespace hvs {
namespace {

constexpr std::size_t lookahead = 32;  // positions whose cache misses overlap

template <class Real> void take_range(const Tensor& tensor, Real* buffer, Real* values) {
  std::copy_n(buffer + tensor.start, tensor.length, values + tensor.start);
  std::fill_n(buffer + tensor.start, tensor.length, Real(0));
}

}  // namespace

template <class Real>
void take(const std::vector<Tensor>& tensors, const std::int32_t* positions, std::size_t count, Real* buffer,
          Real* values) {
  std::fill_n(values, count, Real(0));
  std::size_t i = 0;
  for (const Tensor& tensor : tensors) {
    if (!positions) {
      take_range(tensor, buffer, values);
      continue;
    }
    i = std::size_t(std::lower_bound(positions + i, positions + count, std::int64_t(tensor.start)) - positions);
    for (; i < count && std::size_t(positions[i]) < tensor.stop(); ++i) {
      if (i + lookahead < count) __builtin_prefetch(buffer + positions[i + lookahead], 1);
      values[i] = buffer[positions[i]];
      buffer[positions[i]] = 0;
    }
  }
}

template void take(const std::vector<Tensor>&, const std::int32_t*, std::size_t, float*, float*);
template void take(const std::vector<Tensor>&, const std::int32_t*, std::size_t, double*, double*);

}  // namespace hvs
