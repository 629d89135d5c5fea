// Counter-based pseudo-random numbers: each depends only on the key and its position, not on the device or the order.
#pragma once

#include "portable.hpp"

namespace hvs {

// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit of x affects every bit of the result.
HVS_FUNCTION std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Number i of the SplitMix64 sequence with seed `key`.
HVS_FUNCTION std::uint64_t random_bits(std::uint64_t key, std::uint64_t i) {
  return mix(key + (i + 1) * 0x9e3779b97f4a7c15);
}

}  // namespace hvs
