#include "sparse.hpp"

#include <stdexcept>
#include <string>

namespace hvs {
namespace {

[[noreturn]] void refuse(const char* name, std::size_t at, std::int32_t index, const std::string& why) {
  throw std::invalid_argument(std::string(name) + ": index " + std::to_string(index) + " at entry " +
                              std::to_string(at) + " " + why);
}

}  // namespace

void check_bounds(const std::int32_t* indices, std::size_t count, std::size_t size, const char* name) {
  bool bad = false;
  for (std::size_t i = 0; i < count; ++i) bad |= std::uint32_t(indices[i]) >= std::uint32_t(size);
  for (std::size_t i = 0; bad && i < count; ++i) {
    if (std::uint32_t(indices[i]) >= size) refuse(name, i, indices[i], "is outside of 0 .. " + std::to_string(size));
  }
}

void check_ascending(const std::int32_t* indices, std::size_t count, std::size_t size, const char* name) {
  std::int32_t bad = 0;  // as wide as the indices, so that the loop is vectorised
  for (std::size_t i = 1; i < count; ++i) bad |= indices[i] <= indices[i - 1];
  // Ascending indices are in bounds if the first and the last one are.
  if (bad || (count && (indices[0] < 0 || std::size_t(indices[count - 1]) >= size))) {
    check_bounds(indices, count, size, name);
  }
  for (std::size_t i = 1; bad && i < count; ++i) {
    if (indices[i] <= indices[i - 1]) refuse(name, i, indices[i], "does not ascend; sort the indices, without repeats");
  }
}

}  // namespace hvs
