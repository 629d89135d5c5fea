// Sparse vectors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvs {

// `count` entries with ascending, unique indices. indices == nullptr: the positions 0 .. count.
template <class Real> struct Sparse {
  const std::int32_t* indices;
  const Real* values;
  std::size_t count;
};

// Throw std::invalid_argument unless the indices are in 0 .. size; check_ascending also unless they ascend. `name` is
// the vector's name in messages.
void check_bounds(const std::int32_t* indices, std::size_t count, std::size_t size, const char* name);
void check_ascending(const std::int32_t* indices, std::size_t count, std::size_t size, const char* name);

}  // namespace hvs
