// Updates and queries of count sketches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/sketch.hpp"

namespace hvs {

// A bucket's buffer after a query was added to it and entries were sent.
template <class Real> struct Change {
  const Real* buffer;             // the values that the sketch must represent
  const std::int32_t* delivered;  // positions that were sent, ascending; the buffer holds what was returned there
  std::size_t count;              // the number of delivered positions
  Real carried;                   // factor of the query in the buffer, except at delivered positions
};

// Makes the sketch represent the buffer.
//
// The part of the buffer that was read from the sketch is already in the sketch. Encoding it again would multiply each
// counter by the number of positions that share it, so only buffer - carried * query is added. At a delivered position,
// its share leaves the counter: 1 / L of it if L positions share it, the best estimate that a sum allows.
template <class Real>
void sketch_update(const Change<Real>& change, const Geometry& geometry, std::uint64_t seed, Real* sketch);

// buffer <- scale * query of every position, plus the old buffer if `add`
template <class Real>
void sketch_query(const Real* sketch, const Geometry& geometry, std::uint64_t seed, Real scale, bool add, Real* buffer);

}  // namespace hvs
