// Writing and reading count sketches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/sketch.hpp"

namespace hvs {

// What a bucket's buffer has become since a query was added to it.
template <class Real> struct Change {
  const Real* buffer;             // what shall be held now
  const std::int32_t* delivered;  // positions that were sent, ascending; there the buffer holds what came back
  std::size_t count;              // of them
  Real carried;                   // times the query is in the buffer, except where it was delivered
};

// Makes the sketch hold the buffer.
//
// The part of the buffer that was read off the sketch is in the sketch already. To encode it again would multiply each
// counter by the number of positions that share it, so only buffer - carried * query is added. Where a position was
// delivered, its share leaves the counter: 1 / L of it, if L positions share it, the best estimate that a sum allows.
template <class Real>
void sketch_update(const Change<Real>& change, const Geometry& geometry, std::uint64_t seed, Real* sketch);

// buffer <- scale * query of every position, plus what it holds if `add`
template <class Real>
void sketch_query(const Real* sketch, const Geometry& geometry, std::uint64_t seed, Real scale, bool add, Real* buffer);

}  // namespace hvs
