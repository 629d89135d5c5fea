// Processing a bucket in tiles that stay in the L1 cache while they are converted and used.
#pragma once

#include <algorithm>

#include "../common/sums.hpp"
#include "gradient.hpp"
#include "simd/level.hpp"
#include "stream.hpp"

namespace hvs {

constexpr std::size_t tile_size = tile_of_sums;
// Tile size with momentum, which uses three arrays at once and an array of what is added: full tiles of them would fill
// an L1 cache of 32 KiB, and took a fifth longer.
constexpr std::size_t momentum_tile_size = 512;

// load, with the SIMD level's conversion of adjacent float16 numbers.
template <class Real> void load_tile(const Tensor& t, std::size_t first, std::size_t count, Real* out) {
  if (t.format == Format::float16 && t.stride == sizeof(Half)) {
    loops<Real>().widen_halves(t.data + first * sizeof(Half), count, out);
  } else {
    load(t, first, count, out);
  }
}

// A run of adjacent active positions.
template <class Real> struct Tile {
  const Real* gradient;
  const Real* source;
  Real* buffer;
  std::size_t first;
  std::size_t count;

  bool apart() const { return source != buffer; }
};

// Scales the positions begin .. end, which have no gradient.
template <class Real> void scale_held(const Step<Real>& step, std::size_t begin, std::size_t end) {
  if (step.scale == 1) {
    if (step.source != step.buffer) std::copy(step.source + begin, step.source + end, step.buffer + begin);
    return;
  }
  for (std::size_t i = begin; i < end; ++i) step.buffer[i] = step.scale == 0 ? Real(0) : step.scale * step.source[i];
}

// buffer <- acc
template <class Real> void accumulate_tile(const Tile<Real>& tile, Real scale) {
  const Loops<Real>& use = loops<Real>();
  if (!tile.apart()) return use.accumulate(tile.gradient, tile.buffer, tile.count, scale);
  constexpr Key<Real> none = largest_key<Real>;
  std::int32_t indices[tile_size];
  use.scan_apart(tile.gradient, tile.source, tile.buffer, tile.count, scale, none, none, 0, indices);
}

// buffer <- acc; writes the positions whose key reaches `low`, and returns their number. If the source is a separate
// array, the buffer becomes zero where the key reaches `guess`.
template <class Real>
std::size_t scan_tile(const Tile<Real>& tile, Real scale, Key<Real> low, Key<Real> guess, std::int32_t* indices) {
  const Loops<Real>& use = loops<Real>();
  const auto first = std::int32_t(tile.first);
  if (!tile.apart()) return use.scan(tile.gradient, tile.buffer, tile.count, scale, low, first, indices);
  return use.scan_apart(tile.gradient, tile.source, tile.buffer, tile.count, scale, low - 1, guess - 1, first, indices);
}

// Returns acc at a position of a scanned tile. The buffer becomes zero there if the key reaches `guess`.
template <class Real> Real take_scanned(const Tile<Real>& tile, Real scale, Key<Real> guess, std::int32_t position) {
  const std::size_t i = std::size_t(position) - tile.first;
  if (tile.apart()) return accumulated(tile.source[i], tile.gradient[i], scale);
  const Real acc = tile.buffer[i];
  tile.buffer[i] = magnitude(acc) >= guess ? Real(0) : acc;
  return acc;
}

// Updates the velocity at the positions from `at` on. Returns what is to be added there: the velocity or `scratch`.
template <class Real>
const Real* update(const Velocity<Real>& velocity, const Real* gradient, std::size_t at, std::size_t count,
                   Real* scratch) {
  Real* const u = velocity.values + at;
  if (velocity.alone()) scratch = u;
  loops<Real>().update_velocity(gradient, u, count, velocity, scratch);
  return scratch;
}

// Processes the positions begin .. end in ascending order: calls active(tile) for each tile of the gradients, and
// scales the positions between gradients.
template <class Real, class Active>
void for_each_tile(const Step<Real>& step, std::size_t begin, std::size_t end, const Active& active) {
  alignas(64) Real converted[tile_size], updated[momentum_tile_size];
  const std::size_t most = step.velocity.values ? momentum_tile_size : tile_size;
  std::size_t at = begin;
  auto gradient = std::partition_point(step.gradients.begin(), step.gradients.end(),
                                       [begin](const Tensor& g) { return g.stop() <= begin; });
  for (; gradient != step.gradients.end() && gradient->start < end; ++gradient) {
    const std::size_t start = std::max(gradient->start, begin), stop = std::min(gradient->stop(), end);
    if (at < start) scale_held(step, at, start);
    const Real* const elements = in_place<Real>(*gradient);
    for (at = start; at < stop; at += std::min(most, stop - at)) {
      const std::size_t offset = at - gradient->start, count = std::min(most, stop - at);
      if (!elements) load_tile(*gradient, offset, count, converted);
      const Real* added = elements ? elements + offset : converted;
      if (step.velocity.values) added = update(step.velocity, added, at, count, updated);
      active(Tile<Real>{added, step.source + at, step.buffer + at, at, count});
      if (step.clear) {
        const std::size_t width = bytes_of(gradient->format);
        std::memset(gradient->data + offset * width, 0, count * width);
      }
    }
  }
  if (at < end) scale_held(step, at, end);
  if (step.source != step.buffer) end_stream();
}

}  // namespace hvs
