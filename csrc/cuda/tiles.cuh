// Processing a bucket in tiles: a block accumulates one tile at a time, each thread in its registers.
#pragma once

#include "../common/velocity.hpp"
#include "quads.cuh"
#include "scan.cuh"
#include "segments.cuh"

namespace hvs {

constexpr int quads = 4;  // per thread in a tile, quad * block_threads elements apart
constexpr int tile_size = quad * quads * block_threads;

// Arguments of accumulate: buffer <- scale * source, plus the segments. Positions between segments are only scaled.
template <class Real> struct Step {
  const Segment* segments;
  int count;
  Real* buffer;
  std::int64_t size;
  Real scale;
  const Real* source = nullptr;  // null: the buffer itself
  bool clear = false;            // set the segments to zero afterwards
  Velocity<Real> velocity = {};

  HVS_FUNCTION const Real* from() const { return source ? source : buffer; }
};

// The position of a thread's quad q in the tile at `begin`.
HVS_FUNCTION std::int64_t quad_begin(std::int64_t begin, int q) {
  return begin + std::int64_t(q) * (quad * block_threads) + std::int64_t(threadIdx.x) * quad;
}

// Updates the velocity, whose values start at the tile; acc <- what is to be added to the buffer.
template <class Stored, class Real>
HVS_FUNCTION void update_quads(const Velocity<Real>& velocity, const Quad<Stored> (&gradient)[quads],
                               Real (&acc)[quads][quad]) {
  Quad<Real> u[quads];
#pragma unroll
  for (int q = 0; q < quads; ++q) u[q] = *reinterpret_cast<const Quad<Real>*>(velocity.values + quad_begin(0, q));
#pragma unroll
  for (int q = 0; q < quads; ++q) {
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      const Real x = Real(widen(gradient[q].x[i]));
      u[q].x[i] = velocity.updated(u[q].x[i], x);
      acc[q][i] = velocity.added(u[q].x[i], x);
    }
    *reinterpret_cast<Quad<Real>*>(velocity.values + quad_begin(0, q)) = u[q];
  }
}

// Accumulates a tile inside one segment of type Stored, with all arrays aligned to quads. `moving`: with a velocity,
// which is updated first, so that at most two arrays are in registers.
template <bool moving, class Stored, class Real>
HVS_FUNCTION void accumulate_quads(Stored* gradient, const Real* source, Real* buffer, Real scale, bool clear,
                                   const Velocity<Real>& velocity, Real (&acc)[quads][quad]) {
  Quad<Stored> added[quads];
  Quad<Real> old[quads];
#pragma unroll
  for (int q = 0; q < quads; ++q) added[q] = *reinterpret_cast<const Quad<Stored>*>(gradient + quad_begin(0, q));
  if constexpr (moving) update_quads(velocity, added, acc);
  if (scale != 0) {
#pragma unroll
    for (int q = 0; q < quads; ++q) old[q] = *reinterpret_cast<const Quad<Real>*>(source + quad_begin(0, q));
  } else {
#pragma unroll
    for (int q = 0; q < quads; ++q) old[q] = {};
  }
#pragma unroll
  for (int q = 0; q < quads; ++q) {
    Quad<Real> sum;
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      const Real x = moving ? acc[q][i] : Real(widen(added[q].x[i]));
      sum.x[i] = acc[q][i] = accumulated(old[q].x[i], x, scale);
    }
    *reinterpret_cast<Quad<Real>*>(buffer + quad_begin(0, q)) = sum;
    if (clear) *reinterpret_cast<Quad<Stored>*>(gradient + quad_begin(0, q)) = {};
  }
}

// Calls accumulate_quads if the arrays are aligned; returns whether they are.
template <bool moving, class Stored, class Real>
HVS_FUNCTION bool try_quads(const Step<Real>& step, const Segment& segment, std::int64_t begin,
                            Real (&acc)[quads][quad]) {
  Stored* const gradient = reinterpret_cast<Stored*>(segment.data) + (begin - segment.start);
  const Real* const source = step.from() + begin;
  Real* const buffer = step.buffer + begin;
  if (!aligned(gradient, alignof(Quad<Stored>)) || !aligned(buffer, alignof(Quad<Real>))) return false;
  if (!aligned(source, alignof(Quad<Real>))) return false;
  Velocity<Real> velocity = step.velocity;
  if constexpr (moving) {
    velocity.values += begin;
    if (!aligned(velocity.values, alignof(Quad<Real>))) return false;
  }
  accumulate_quads<moving>(gradient, source, buffer, step.scale, step.clear, velocity, acc);
  return true;
}

template <bool moving, class Real>
HVS_FUNCTION bool accumulate_inside(const Step<Real>& step, const Segment& segment, std::int64_t begin,
                                    Real (&acc)[quads][quad]) {
  switch (segment.format) {
    case format_float32: return try_quads<moving, float>(step, segment, begin, acc);
    case format_float16: return try_quads<moving, Half>(step, segment, begin, acc);
    case format_bfloat16: return try_quads<moving, BFloat16>(step, segment, begin, acc);
    default: return try_quads<moving, double>(step, segment, begin, acc);
  }
}

// Accumulates any tile, element by element. Returns a bit per element of the thread, set if it is inside a segment.
template <bool moving, class Real>
HVS_FUNCTION std::uint32_t accumulate_any(const Step<Real>& step, int first, std::int64_t begin,
                                          Real (&acc)[quads][quad]) {
  std::uint32_t active = 0;
  int s = first;
#pragma unroll
  for (int q = 0; q < quads; ++q) {
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      const std::int64_t at = quad_begin(begin, q) + i;
      acc[q][i] = 0;
      if (at >= step.size) continue;
      while (s < step.count && step.segments[s].stop() <= at) ++s;
      const bool inside = s < step.count && step.segments[s].start <= at;
      const Real old = step.from()[at];
      if (inside) {
        Real x = load<Real>(step.segments[s], at - step.segments[s].start);
        if constexpr (moving) {
          Real& u = step.velocity.values[at];
          x = step.velocity.added(u = step.velocity.updated(u, x), x);
        }
        acc[q][i] = accumulated(old, x, step.scale);
      } else {
        acc[q][i] = held(old, step.scale);
      }
      step.buffer[at] = acc[q][i];
      if (inside && step.clear) store(step.segments[s], at - step.segments[s].start, Real(0));
      active |= std::uint32_t(inside) << (q * quad + i);
    }
  }
  return active;
}

// buffer <- acc for one tile. Leaves the thread's elements in `acc`; returns which of them are inside a segment.
template <bool moving = false, class Real>
HVS_FUNCTION std::uint32_t accumulate_tile(const Step<Real>& step, std::int64_t begin, Real (&acc)[quads][quad]) {
  const int s = first_behind(step.segments, step.count, begin);
  if (s < step.count && step.segments[s].start <= begin && begin + tile_size <= step.segments[s].stop()) {
    if (accumulate_inside<moving>(step, step.segments[s], begin, acc)) return (1u << (quads * quad)) - 1;
  }
  return accumulate_any<moving>(step, s, begin, acc);
}

}  // namespace hvs
