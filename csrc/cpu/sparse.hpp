// Sparse vectors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvs {

// count entries, ascending and unique. indices == nullptr: the positions 0 .. count.
template <class Real> struct Sparse {
  const std::int32_t* indices;
  const Real* values;
  std::size_t count;
};

// Throw std::invalid_argument unless the indices lie in 0 .. size; the second, unless they ascend too. `name` is
// how messages call the vector.
void check_bounds(const std::int32_t* indices, std::size_t count, std::size_t size, const char* name);
void check_ascending(const std::int32_t* indices, std::size_t count, std::size_t size, const char* name);

}  // namespace hvs
