// Adjacent elements that a thread loads and stores together.
#pragma once

#include "../common/portable.hpp"

namespace hvs {

constexpr int quad = 4;

template <class T> struct alignas(quad * sizeof(T) < 16 ? quad * sizeof(T) : 16) Quad {
  T x[quad];
};

HVS_FUNCTION bool aligned(const void* p, std::size_t bytes) { return reinterpret_cast<std::size_t>(p) % bytes == 0; }

}  // namespace hvs
