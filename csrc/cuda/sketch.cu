// Count sketches with the same bits as the CPU kernels: each counter receives its additions in ascending position
// order.
#include "../common/sketch.hpp"
#include "scan.cuh"

namespace hvs {

constexpr int lane_count = int(lanes);
constexpr int half_warps = block_threads / lane_count;  // each processes the lanes of one group at a time
constexpr int longest_section = int(section_vectors);
// Upper bound of a section's groups over all rows: a sketch as long as its bucket, rounded up in each row.
constexpr int most_bins = longest_section + 4;

// The place of a vector in one word: its group, then the signs of its lanes.
HVS_FUNCTION std::uint32_t packed_place(std::uint64_t key, std::size_t vector, std::size_t groups) {
  const Place p = place(key, vector, groups);
  return p.group << 16 | p.negative;
}
HVS_FUNCTION std::uint32_t group_of(std::uint32_t packed) { return packed >> 16; }
HVS_FUNCTION bool negative_of(std::uint32_t packed, int lane) { return packed >> lane & 1; }

// --- query -----------------------------------------------------------------------------------------------------------

constexpr int query_parts = longest_section / block_threads;  // thread blocks per section

// buffer <- scale * query of every position, plus the old buffer if `add`. Each thread hashes one of its warp's 32
// vectors; then the warp reads and writes two vectors at a time, 64 bytes of a group for each.
template <class Real, int rows>
__global__ void __launch_bounds__(block_threads)
    query(const Real* sketch, std::size_t size, std::size_t groups, std::uint64_t seed, Real scale, int add,
          Real* buffer) {
  __shared__ Section<const Real> shared_section;
  if (threadIdx.x == 0) {
    shared_section = Geometry{size, std::size_t(rows), groups}.section(blockIdx.x / query_parts, sketch);
  }
  __syncthreads();
  const Section<const Real> section = shared_section;
  const int lane = threadIdx.x % lane_count;
  const std::size_t first = section.first + blockIdx.x % query_parts * block_threads + threadIdx.x / 32 * 32;
  if (first >= section.last) return;
  std::uint32_t mine[rows];
#pragma unroll
  for (int row = 0; row < rows; ++row) {
    mine[row] = packed_place(row_key(seed, row), first + threadIdx.x % 32, section.groups);
  }
#pragma unroll 4
  for (int i = 0; i < 32; i += 2) {
    const int from = i + int(threadIdx.x % 32) / lane_count;
    Real estimates[rows];
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      const std::uint32_t packed = __shfl_sync(full_warp, mine[row], from);
      const std::size_t bin = row * section.groups + group_of(packed);
      estimates[row] = with_sign(section.counters[bin * lanes + lane], negative_of(packed, lane));
    }
    const Real found = scale * median_of(estimates);
    const std::size_t vector = first + from, at = vector * lanes + lane;
    if (vector < section.last && at < size) buffer[at] = add ? buffer[at] + found : found;
  }
}

// --- update ----------------------------------------------------------------------------------------------------------
//
// A thread block processes a section. It sorts the section's vectors by group, ascending within each group, by a
// counting sort in shared memory: one warp per row processes 32 vectors at a time. Then a half-warp at a time adds the
// vectors of a group, 64 or 128 adjacent bytes each, to the group's counters in registers. The buffer is read once per
// row, and the counters are read and written once. With several rows, the estimates that an update subtracts need
// counters other than the thread's own, as they were before the update, so the section is copied first.

template <class Real> struct Shared {
  Section<Real> section;
  std::size_t sent_begin, sent_end;  // entries of `delivered` in this section
};

template <int rows> struct Sorted {
  std::uint32_t places[rows][longest_section];
  std::uint16_t order[rows * longest_section];  // vectors of the section, by row and group
  std::uint32_t ends[most_bins];                // of the groups of all rows in `order`
  std::uint32_t sent[longest_section];          // a bit per lane, set where the position was delivered
};

HVS_FUNCTION std::size_t first_not_below(const std::int32_t* ascending, std::size_t count, std::size_t limit) {
  std::size_t low = 0, high = count;
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if (ascending[middle] < std::int64_t(limit)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Converts the number of vectors in each bin to the begin of the bin in the order.
HVS_FUNCTION void begins_of(std::uint32_t* counts, int bins) {
  constexpr int each = (most_bins + block_threads - 1) / block_threads;
  const int first = int(threadIdx.x) * each;
  std::uint32_t sum = 0;
  for (int i = first; i < first + each && i < bins; ++i) sum += counts[i];
  std::uint32_t at = scan_block(sum).before;
  for (int i = first; i < first + each && i < bins; ++i) {
    const std::uint32_t count = counts[i];
    counts[i] = at;
    at += count;
  }
  __syncthreads();
}

// Sorts the vectors of one row into the order, with one warp; begins become ends. `first_bin` is the row's first bin.
HVS_FUNCTION void sort_row(const std::uint32_t* places, int vectors, int first_bin, std::uint32_t* begins,
                           std::uint16_t* order) {
  const int lane = threadIdx.x % 32;
  for (int begin = 0; begin < vectors; begin += 32) {
    const int vector = begin + lane;
    const bool there = vector < vectors;
    const int bin = there ? first_bin + int(group_of(places[vector])) : -1;
    const unsigned same = __match_any_sync(full_warp, bin);
    const int before = __popc(same & ((1u << lane) - 1));
    const std::uint32_t at = there ? begins[bin] + before : 0;
    __syncwarp();
    if (there) order[at] = std::uint16_t(vector);
    if (there && before == 0) begins[bin] = at + __popc(same);
    __syncwarp();
  }
}

// A half-warp's part of an update: one group of one row.
template <class Real, int rows> struct Group {
  const Section<Real>& section;
  const Sorted<rows>& sorted;
  std::size_t size;
  const Real* buffer;
  const Real* old;  // the section's counters before the update; only with several rows
  Real carried;
  int row;
  Real before;  // the thread's counter

  HVS_FUNCTION std::size_t position(int vector) const {
    return (section.first + vector) * lanes + threadIdx.x % lane_count;
  }
  HVS_FUNCTION bool negative(int vector, int in_row) const {
    return negative_of(sorted.places[in_row][vector], threadIdx.x % lane_count);
  }
  HVS_FUNCTION Real estimate(int vector) const {
    Real estimates[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const std::size_t bin = r * section.groups + group_of(sorted.places[r][vector]);
      const Real counter = rows == 1 ? before : old[bin * lanes + threadIdx.x % lane_count];
      estimates[r] = with_sign(counter, negative(vector, r));
    }
    return median_of(estimates);
  }
  HVS_FUNCTION Real change(int vector) const {
    const Real x = buffer[position(vector)];
    return carried == 0 ? x : x - carried * estimate(vector);
  }

  // The counter after adding the vectors begin .. end of the order. Loads several at a time.
  HVS_FUNCTION Real added(std::uint32_t begin, std::uint32_t end) const {
    constexpr int together = 4;
    Real total = before;
    for (std::uint32_t i = begin; i < end; i += together) {
      int vectors[together];
      Real changes[together];
#pragma unroll
      for (int j = 0; j < together; ++j) {
        vectors[j] = i + j < end ? sorted.order[i + j] : -1;
        if (vectors[j] >= 0 && position(vectors[j]) >= size) vectors[j] = -1;
        changes[j] = vectors[j] >= 0 ? change(vectors[j]) : Real(0);
      }
#pragma unroll
      for (int j = 0; j < together; ++j) {
        if (vectors[j] >= 0) total += with_sign(changes[j], negative(vectors[j], row));
      }
    }
    return total;
  }

  // Corrects the total at delivered positions: the buffer no longer contains the estimate there, so it is added back,
  // and the position's share leaves the counter.
  HVS_FUNCTION Real corrected(Real total, std::uint32_t begin, std::uint32_t end) const {
    const Real share = before / Real(end - begin);
    for (std::uint32_t i = begin; i < end; ++i) {
      const int vector = sorted.order[i];
      if (!(sorted.sent[vector] >> threadIdx.x % lane_count & 1)) continue;
      total += carried * (with_sign(estimate(vector), negative(vector, row)) - share);
    }
    return total;
  }
};

// Hashes the section's vectors and counts the vectors of each bin.
template <int rows, class Real>
HVS_FUNCTION void place_section(const Section<Real>& section, std::uint64_t seed, Sorted<rows>& sorted) {
  const int vectors = int(section.last - section.first), groups = int(section.groups);
  for (int row = 0; row < rows; ++row) {
    const std::uint64_t key = row_key(seed, row);
    for (int i = threadIdx.x; i < vectors; i += block_threads) {
      const std::uint32_t packed = packed_place(key, section.first + i, section.groups);
      sorted.places[row][i] = packed;
      atomicAdd(&sorted.ends[row * groups + int(group_of(packed))], 1u);
    }
  }
}

// Makes the sketch represent the buffer; see the CPU kernel. `copies` holds a section's counters for each thread block;
// it is needed with several rows if something is carried.
template <class Real, int rows>
__global__ void __launch_bounds__(block_threads)
    update(Real* sketch, std::size_t size, std::size_t groups, std::uint64_t seed, const Real* buffer,
           const std::int32_t* delivered, std::size_t delivered_count, Real carried, Real* copies, std::size_t room) {
  __shared__ Shared<Real> shared;
  __shared__ Sorted<rows> sorted;
  const Geometry geometry = {size, std::size_t(rows), groups};
  const std::size_t sections = geometry.sections();
  if (carried == 0) delivered_count = 0;
  for (std::size_t number = blockIdx.x; number < sections; number += gridDim.x) {
    __syncthreads();  // the previous section is finished
    if (threadIdx.x == 0) shared.section = geometry.section(number, sketch);
    for (int i = threadIdx.x; i < most_bins; i += block_threads) sorted.ends[i] = 0;
    for (int i = threadIdx.x; i < longest_section; i += block_threads) sorted.sent[i] = 0;
    __syncthreads();
    const Section<Real> section = shared.section;
    const int vectors = int(section.last - section.first), bins = rows * int(section.groups);
    if (threadIdx.x == 0) shared.sent_begin = first_not_below(delivered, delivered_count, section.first * lanes);
    if (threadIdx.x == 1) shared.sent_end = first_not_below(delivered, delivered_count, section.last * lanes);
    place_section<rows>(section, seed, sorted);
    Real* const old = rows > 1 && carried != 0 ? copies + blockIdx.x * room : nullptr;
    for (int i = threadIdx.x; old && i < bins * lane_count; i += block_threads) old[i] = section.counters[i];
    __syncthreads();
    const std::size_t sent_begin = shared.sent_begin, sent_end = shared.sent_end;
    for (std::size_t i = sent_begin + threadIdx.x; i < sent_end; i += block_threads) {
      const std::size_t position = std::size_t(delivered[i]), vector = position / lanes - section.first;
      if (vector < std::size_t(vectors)) atomicOr(&sorted.sent[vector], 1u << position % lanes);  // else: not ascending
    }
    begins_of(sorted.ends, bins);
    const int row = threadIdx.x / 32;
    if (row < rows) sort_row(sorted.places[row], vectors, row * int(section.groups), sorted.ends, sorted.order);
    __syncthreads();
    for (int bin = threadIdx.x / lane_count; bin < bins; bin += half_warps) {
      const std::uint32_t begin = bin == 0 ? 0 : sorted.ends[bin - 1], end = sorted.ends[bin];
      if (begin == end) continue;
      Real& counter = section.counters[std::size_t(bin) * lanes + threadIdx.x % lane_count];
      const Group<Real, rows> group = {section, sorted, size, buffer, old, carried,
                                       rows == 1 ? 0 : bin / int(section.groups), counter};
      const Real total = group.added(begin, end);
      counter = sent_begin < sent_end ? group.corrected(total, begin, end) : total;
    }
  }
}

}  // namespace hvs
