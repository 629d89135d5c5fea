// Walking a bucket in tiles that stay in the L1 cache while they are converted and used.
#pragma once

#include <algorithm>

#include "../common/sums.hpp"
#include "gradient.hpp"
#include "simd/level.hpp"

namespace hvs {

constexpr std::size_t tile_size = tile_of_sums;

// load, with the SIMD level's own conversion where there is one.
template <class Real> void load_tile(const Tensor& t, std::size_t first, std::size_t count, Real* out) {
  if (t.format == Format::float16 && t.stride == sizeof(Half)) {
    loops<Real>().widen_halves(t.data + first * sizeof(Half), count, out);
  } else {
    load(t, first, count, out);
  }
}

// Visits the positions begin .. end in ascending order: active(gradient elements, first position, count) for each tile
// of the gradients, held(first position, end position) between them.
template <class Real, class Active, class Held>
void for_each_tile(const Step<Real>& step, std::size_t begin, std::size_t end, const Active& active, const Held& held) {
  alignas(64) Real converted[tile_size];
  std::size_t at = begin;
  auto gradient = std::partition_point(step.gradients.begin(), step.gradients.end(),
                                       [begin](const Tensor& g) { return g.stop() <= begin; });
  for (; gradient != step.gradients.end() && gradient->start < end; ++gradient) {
    const std::size_t start = std::max(gradient->start, begin), stop = std::min(gradient->stop(), end);
    if (at < start) held(at, start);
    const Real* const elements = in_place<Real>(*gradient);
    for (at = start; at < stop; at += std::min(tile_size, stop - at)) {
      const std::size_t offset = at - gradient->start, count = std::min(tile_size, stop - at);
      if (!elements) load_tile(*gradient, offset, count, converted);
      active(elements ? elements + offset : converted, at, count);
    }
  }
  if (at < end) held(at, end);
}

// What happens to a position without a gradient.
template <class Real> void scale_held(const Step<Real>& step, std::size_t begin, std::size_t end) {
  if (step.scale == 1) return;
  for (std::size_t i = begin; i < end; ++i) step.buffer[i] = step.scale == 0 ? Real(0) : step.scale * step.buffer[i];
}

}  // namespace hvs
