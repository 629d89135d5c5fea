// Prefix sums over the threads of a block, and over blocks that run in any order.
#pragma once

#include "../common/portable.hpp"

namespace hvs {

constexpr int block_threads = 256;  // of every kernel that uses this header
constexpr int block_warps = block_threads / 32;
constexpr unsigned full_warp = 0xffffffffu;

template <class Count> struct Prefix {
  Count before;  // sum over the preceding threads
  Count total;   // sum over all threads
};

// All threads of the block must call this. Count may pack several counts if none of their sums overflows.
template <class Count> HVS_FUNCTION Prefix<Count> scan_block(Count mine) {
  __shared__ Count totals[block_warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Count sum = mine;
  for (int distance = 1; distance < 32; distance *= 2) {
    const Count lower = __shfl_up_sync(full_warp, sum, distance);
    if (lane >= distance) sum += lower;
  }
  __syncthreads();  // the previous call's totals have been read
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  Prefix<Count> prefix = {sum - mine, 0};
  for (int i = 0; i < block_warps; ++i) {
    if (i < warp) prefix.before += totals[i];
    prefix.total += totals[i];
  }
  return prefix;
}

// The next number of a counter, the same for all threads of the block. Blocks get tickets in the order in which they
// start, so every block that this one waits for is already running.
HVS_FUNCTION std::int64_t take_ticket(std::uint32_t* counter) {
  __shared__ std::uint32_t ticket;
  __syncthreads();  // the previous ticket has been read
  if (threadIdx.x == 0) ticket = atomicAdd(counter, 1u);
  __syncthreads();
  return ticket;
}

// Published state of a tile: a flag in the highest two bits, counts in the others. They share one word, so that a
// reader that sees the flag sees the counts.
using Status = std::uint64_t;
constexpr Status counts_of_tile = Status(1) << 62, counts_up_to_tile = Status(2) << 62;
constexpr Status only_counts = (Status(1) << 62) - 1;

// Packs two counts, each below 2^31.
HVS_FUNCTION std::uint64_t two_counts(std::uint32_t low, std::uint32_t high) {
  return low | std::uint64_t(high) << 31;
}
HVS_FUNCTION std::uint32_t low_count(std::uint64_t counts) { return std::uint32_t(counts) & 0x7fffffffu; }
HVS_FUNCTION std::uint32_t high_count(std::uint64_t counts) { return std::uint32_t(counts >> 31); }

// The sum of the counts of all preceding tiles (decoupled look-back: Merrill and Garland, "Single-pass Parallel Prefix
// Scan with Decoupled Look-back", 2016). All threads of the block must call this and get the same result. The statuses
// must be zero at the start, and tiles must be numbered by tickets.
HVS_FUNCTION std::uint64_t look_back(volatile Status* statuses, std::int64_t tile, std::uint64_t counts) {
  __shared__ std::uint64_t sum;
  if (threadIdx.x < 32) {
    const int lane = int(threadIdx.x);
    if (lane == 0) statuses[tile] = (tile == 0 ? counts_up_to_tile : counts_of_tile) | counts;
    std::uint64_t before = 0;
    for (std::int64_t last = tile - 1; last >= 0; last -= 32) {
      const std::int64_t other = last - lane;
      Status status = other < 0 ? counts_up_to_tile : statuses[other];
      while (__any_sync(full_warp, status >> 62 == 0)) {
        if (status >> 62 == 0) status = statuses[other];
      }
      const unsigned complete = __ballot_sync(full_warp, status >> 62 == 2);
      const int nearest = complete == 0 ? 31 : __ffs(int(complete)) - 1;
      std::uint64_t part = lane <= nearest ? status & only_counts : 0;
      for (int distance = 16; distance > 0; distance /= 2) part += __shfl_xor_sync(full_warp, part, distance);
      before += part;
      if (complete != 0) break;
    }
    if (lane == 0) {
      if (tile > 0) statuses[tile] = counts_up_to_tile | (before + counts);
      sum = before;
    }
  }
  __syncthreads();
  const std::uint64_t result = sum;
  __syncthreads();  // before the next call writes
  return result;
}

}  // namespace hvs
