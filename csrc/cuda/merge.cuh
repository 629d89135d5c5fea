// The sum of sparse vectors: reads their entries twice and writes the union once.
//
// The bucket is divided into tiles of 2^width positions, each processed by one block.
// bounds: finds where each tile's entries begin in each vector, and which tiles have any.
// merge: marks the positions of a tile's entries in a bitmap; the number of marks before a position is the slot of its
// sum in the tile. Then adds the values there, vector by vector. Decoupled look-back gives the tile's offset in the
// union.
//
// No index causes an access outside the arrays: entries outside a tile are skipped, and there are never more sums than
// entries, in a tile or in total.
#pragma once

#include "scan.cuh"

namespace hvs {

constexpr int word = 32;             // positions per word of the bitmap
constexpr int most_words = 1024;     // words of a tile's bitmap; the host makes no wider tiles
constexpr int most_in_block = 2048;  // sums of a tile that fit in the block's shared memory
constexpr int marked_at_once = 8;    // adjacent entries per thread when marking
constexpr int loads_at_once = 4;     // vectors, or rounds over one vector, whose loads overlap

// A sparse vector. The output of bounds, `starts`, has a number per tile and vector, and a last row with the ends.
struct Vector {
  const std::int32_t* indices;
  const char* values;
  std::int64_t count;
};

// State shared by the kernels; all bytes are zero at the start.
struct Plan {
  std::int64_t total;      // entries of the union
  std::int32_t left, end;  // tiles from the first one with entries on; one past the last tile with entries
  std::uint32_t ticket;
};

// The position of the first entry whose index is at least `position`.
HVS_FUNCTION std::int64_t first_from(const Vector& vector, std::int64_t position) {
  std::int64_t low = 0, high = vector.count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (vector.indices[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(block_threads)
    bounds(const Vector* vectors, int count, std::uint32_t size, int width, int tiles, std::int32_t* starts,
           Plan* plan) {
  const std::int64_t i = std::int64_t(blockIdx.x) * block_threads + threadIdx.x, rows = std::int64_t(tiles) + 1;
  if (i >= rows * count) return;
  const int v = int(i / rows), tile = int(i % rows);  // adjacent threads search one vector for adjacent tiles
  const Vector vector = vectors[v];
  const std::int64_t start = first_from(vector, tile < tiles ? std::int64_t(tile) << width : std::int64_t(size));
  starts[std::int64_t(tile) * count + v] = std::int32_t(start);
  // Indices below zero or beyond the last tile raise neither number above zero.
  if (tile == 0 && start < vector.count) atomicMax(&plan->left, tiles - (vector.indices[start] >> width));
  if (tile == tiles && start > 0) atomicMax(&plan->end, (vector.indices[start - 1] >> width) + 1);
}

// A tile, as seen by its block.
struct Tile {
  const Vector* vectors;
  int count;
  const std::int32_t* starts;  // begins of each vector's entries; the ends follow in the same order
  std::uint32_t begin, positions;
  std::uint32_t* marks;   // a bit for each position
  std::uint16_t* before;  // marks before each word

  // At least `positions` for an entry outside the tile.
  HVS_FUNCTION std::uint32_t offset_of(std::int32_t index) const { return std::uint32_t(index) - begin; }
};

// Marks a run of entries. Adjacent entries often share a word, which then takes one atomic operation.
HVS_FUNCTION void mark_run(const Tile& tile, const std::int32_t* indices, std::int64_t count) {
  std::uint32_t offsets[marked_at_once];
  for (int i = 0; i < marked_at_once; ++i) offsets[i] = i < count ? tile.offset_of(indices[i]) : tile.positions;
  std::uint32_t at = 0, bits = 0;
  for (int i = 0; i < marked_at_once; ++i) {
    if (offsets[i] >= tile.positions) continue;
    if (offsets[i] / word != at) {
      if (bits != 0) atomicOr(&tile.marks[at], bits);
      at = offsets[i] / word;
      bits = 0;
    }
    bits |= 1u << offsets[i] % word;
  }
  if (bits != 0) atomicOr(&tile.marks[at], bits);
}

// Marks all entries of the tile; the vectors are distributed over teams of threads.
HVS_FUNCTION void mark(const Tile& tile) {
  int teams = 1;
  while (teams < block_warps && 2 * teams <= tile.count) teams *= 2;
  const int members = block_threads / teams, team = int(threadIdx.x) / members, member = int(threadIdx.x) % members;
  for (int v = team; v < tile.count; v += teams) {
    const std::int32_t* const indices = tile.vectors[v].indices;
    const std::int64_t end = tile.starts[tile.count + v];
    for (std::int64_t i = tile.starts[v] + member * marked_at_once; i < end; i += members * marked_at_once) {
      mark_run(tile, indices + i, end - i);
    }
  }
}

// Counts the marks before every word; returns the number of marks in the tile.
HVS_FUNCTION std::uint32_t count_marks(const Tile& tile, int words) {
  const int mine = words > block_threads ? words / block_threads : 1, first = int(threadIdx.x) * mine;
  std::uint32_t sum = 0;
  for (int w = first; w < first + mine && w < words; ++w) sum += std::uint32_t(__popc(tile.marks[w]));
  const Prefix<std::uint32_t> prefix = scan_block(sum);
  std::uint32_t before = prefix.before;
  for (int w = first; w < first + mine && w < words; ++w) {
    tile.before[w] = std::uint16_t(before);
    before += std::uint32_t(__popc(tile.marks[w]));
  }
  return prefix.total;
}

template <class Real> struct Entry {
  std::uint32_t offset;
  Real value;
};

// Entry i of a vector in the tile; after the last, an entry outside the tile.
template <class Real> HVS_FUNCTION Entry<Real> entry(const Tile& tile, int v, std::int64_t i) {
  if (v >= tile.count || i >= tile.starts[tile.count + v]) return {tile.positions, Real(0)};
  const Vector& vector = tile.vectors[v];
  return {tile.offset_of(vector.indices[i]), reinterpret_cast<const Real*>(vector.values)[i]};
}

// The neutral element: neutral + x has the bits of x for every number x, including -0.0 and 0.0.
template <class Real> constexpr Real neutral = Real(-0.0);

// Of two NaNs, the first stays, with its payload.
template <class Real> HVS_FUNCTION Real plus(Real sum, Real x) {
  const Real next = sum + x;
  if (next == next) return next;
  return sum != sum ? sum : x != x ? x : next;
}

template <class Real>
HVS_FUNCTION void add_entry(const Tile& tile, const Entry<Real>& entry, Real* sums, std::int32_t* indices) {
  if (entry.offset >= tile.positions) return;
  const std::uint32_t w = entry.offset / word, lower = (1u << entry.offset % word) - 1;
  const std::uint32_t place = tile.before[w] + std::uint32_t(__popc(tile.marks[w] & lower));
  const Real sum = sums[place];
  // The sum is zero if nothing was added yet. It can also become zero later: then the same index is written again.
  if (sum == 0) indices[place] = std::int32_t(tile.begin + entry.offset);
  sums[place] = plus(sum, entry.value);
}

// Adds the vectors one after another. A vector has each position at most once, so no two threads add to the same sum.
template <class Real> HVS_FUNCTION void add_vectors(const Tile& tile, Real* sums, std::int32_t* indices) {
  Entry<Real> entries[loads_at_once];
  for (int v = 0; v < tile.count; v += loads_at_once) {
    for (int u = 0; u < loads_at_once; ++u) {
      entries[u] = entry<Real>(tile, v + u, v + u < tile.count ? tile.starts[v + u] + std::int64_t(threadIdx.x) : 0);
    }
    for (int u = 0; u < loads_at_once && v + u < tile.count; ++u) {
      add_entry(tile, entries[u], sums, indices);
      const std::int64_t end = tile.starts[tile.count + v + u];
      for (std::int64_t i = tile.starts[v + u] + block_threads + std::int64_t(threadIdx.x); i < end;
           i += loads_at_once * block_threads) {
        Entry<Real> more[loads_at_once];
        for (int r = 0; r < loads_at_once; ++r) more[r] = entry<Real>(tile, v + u, i + r * block_threads);
        for (int r = 0; r < loads_at_once; ++r) add_entry(tile, more[r], sums, indices);
      }
      __syncthreads();
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(block_threads)
    merge(const Vector* vectors, int count, std::uint32_t size, int width, int tiles, const std::int32_t* starts,
          Plan* plan, Status* statuses, std::int32_t* indices, Real* values) {
  __shared__ std::uint32_t marks[most_words];
  __shared__ std::uint16_t before[most_words];
  __shared__ Real held[most_in_block];
  const int words = 1 << width >> 5, first = tiles - plan->left, end = plan->end;
  for (;;) {
    const std::int64_t number = take_ticket(&plan->ticket);
    if (first + number >= end) return;
    const std::uint32_t begin = std::uint32_t(first + number) << width, rest = size - begin;
    const Tile tile = {vectors, count, starts + (first + number) * count, begin, min(rest, 1u << width), marks, before};
    for (int w = int(threadIdx.x); w < words; w += block_threads) marks[w] = 0;
    __syncthreads();
    mark(tile);
    __syncthreads();
    const std::uint32_t found = count_marks(tile, words);
    const std::int64_t place = std::int64_t(look_back(statuses, number, found));
    if (first + number == end - 1 && threadIdx.x == 0) plan->total = place + found;
    Real* const sums = found <= most_in_block ? held : values + place;
    for (std::uint32_t i = threadIdx.x; i < found; i += block_threads) sums[i] = neutral<Real>;
    __syncthreads();
    if (found == 0) continue;
    add_vectors(tile, sums, indices + place);
    if (sums != held) continue;
    for (std::uint32_t i = threadIdx.x; i < found; i += block_threads) values[place + i] = held[i];
  }
}

}  // namespace hvs
