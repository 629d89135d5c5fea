// Sums in the order of ../common/sums.hpp: eight threads are the lanes of a tile, and a warp adds the tiles' sums.
#pragma once

#include "../common/sums.hpp"
#include "scan.cuh"
#include "segments.cuh"

namespace hvs {

constexpr int sum_lanes = int(lanes_of_sums);
constexpr int sum_tile = int(tile_of_sums);

// The sum over each eight adjacent lanes of a warp, in all eight. Addition commutes, so they get the same bits.
HVS_FUNCTION double fold_lanes(double mine) {
#pragma unroll
  for (int distance = sum_lanes / 2; distance > 0; distance /= 2) mine += __shfl_xor_sync(full_warp, mine, distance);
  return mine;
}

template <class Count> HVS_FUNCTION Count sum_over_warp(Count mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_xor_sync(full_warp, mine, distance);
  return mine;
}

template <class T> HVS_FUNCTION T largest_in_warp(T mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(full_warp, mine, distance);
    mine = other > mine ? other : mine;
  }
  return mine;
}

// ((0 + v0) + v1) + v2 ..., returned to the entire warp. The additions depend on each other and take about eight clock
// cycles each; the loads finish before they are needed.
HVS_FUNCTION double add_in_order(const double* values, std::int64_t count) {
  const int lane = threadIdx.x % 32;
  double total = 0, next = lane < count ? values[lane] : 0;
  for (std::int64_t begin = 0; begin < count; begin += 32) {
    const double mine = next;
    const std::int64_t ahead = begin + 32 + lane;
    next = ahead < count ? values[ahead] : 0;  // zeros after the end change nothing: no sum is -0
#pragma unroll
    for (int i = 0; i < 32; ++i) total += __shfl_sync(full_warp, mine, i);
  }
  return total;
}

// The number of the first part of tensor s. Tensors are divided into parts of at most `length` elements, which the
// blocks of a grid share. Numbers of different tensors never collide, some numbers have no part, and all are below
// active positions / length + tensors.
HVS_FUNCTION std::int64_t first_part(const Segment& segment, int s, int length) { return segment.before / length + s; }

struct Part {
  std::int64_t offset;  // in the tensor
  std::int32_t tensor, size;
};

HVS_FUNCTION Part part_of(const Segment* segments, int count, std::int64_t number, int length) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (first_part(segments[middle], middle, length) <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const std::int64_t offset = (number - first_part(segments[low], low, length)) * length;
  const std::int64_t left = segments[low].length - offset;
  return {offset, low, std::int32_t(left > length ? length : left > 0 ? left : 0)};
}

}  // namespace hvs
