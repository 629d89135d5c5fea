// Statistics of a bucket or of gradients, computed before the selection: sums in a fixed order, counts, samples.
#include "sums.cuh"
#include "tiles.cuh"

namespace hvs {

// --- accumulate, and sums over the segments --------------------------------------------------------------------------
//
// A thread block processes a block of positions, and each of its warps a tile. A warp accumulates a chunk of its tile,
// with the same coalescing as accumulate, and writes it to shared memory. Then its threads are the eight lanes of three
// sums and add one element after another. This takes about eight instructions for eight elements: a third of what an
// H200 issues in the time in which it moves their 96 bytes. On devices that compute float64 at 1/32 or 1/64 of the
// speed of float32, as graphics cards do, the additions take longer than memory.

constexpr int chunk = 32 * quad * quads;
constexpr int chunk_quads = chunk / quad;
constexpr int moments_of_tile = 4;  // sum, squares, magnitudes, largest magnitude

// buffer <- acc for n elements, at most a chunk. Also writes acc to `out`, followed by zeros, which change no sum.
// Returns the largest key among the thread's elements.
template <class Stored, class Real>
HVS_FUNCTION Key<Real> accumulate_any_chunk(const Stored* gradient, Real* buffer, int n, Real scale, Real* out) {
  constexpr int together = 8;
  const int lane = threadIdx.x % 32;
  Key<Real> largest = 0;
#pragma unroll 1
  for (int begin = lane; begin < chunk; begin += 32 * together) {
    Stored added[together];
    Real old[together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int i = begin + 32 * j;
      added[j] = i < n ? gradient[i] : Stored{};
      old[j] = i < n && scale != 0 ? buffer[i] : Real(0);
    }
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const int i = begin + 32 * j;
      const Real acc = i < n ? accumulated(old[j], Real(widen(added[j])), scale) : Real(0);
      if (i < n) buffer[i] = acc;
      out[i] = acc;
      largest = magnitude(acc) > largest ? magnitude(acc) : largest;
    }
  }
  return largest;
}

// The same for a full chunk that is aligned to quads.
template <class Stored, class Real>
HVS_FUNCTION Key<Real> accumulate_chunk(const Stored* gradient, Real* buffer, Real scale, Quad<Real>* out) {
  const int lane = threadIdx.x % 32;
  Quad<Stored> added[quads];
  Quad<Real> old[quads];
#pragma unroll
  for (int q = 0; q < quads; ++q) {
    added[q] = reinterpret_cast<const Quad<Stored>*>(gradient)[32 * q + lane];
    old[q] = scale != 0 ? reinterpret_cast<const Quad<Real>*>(buffer)[32 * q + lane] : Quad<Real>{};
  }
  Key<Real> largest = 0;
#pragma unroll
  for (int q = 0; q < quads; ++q) {
    Quad<Real> acc;
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      acc.x[i] = accumulated(old[q].x[i], Real(widen(added[q].x[i])), scale);
      largest = magnitude(acc.x[i]) > largest ? magnitude(acc.x[i]) : largest;
    }
    reinterpret_cast<Quad<Real>*>(buffer)[32 * q + lane] = acc;
    out[32 * q + lane] = acc;
  }
  return largest;
}

// Adds n elements of a tile, followed by zeros, to a sum; n is less than a chunk only in the last chunk of the tile.
template <class Real> HVS_FUNCTION void add_chunk(const Real* acc, int n, double& total) {
  const int lane = threadIdx.x % sum_lanes, which = threadIdx.x % 32 / sum_lanes;
  const Key<Real> kept = which == 0 ? Key<Real>(-1) : largest_key<Real>;  // mask: all bits, or those of the magnitude
#pragma unroll 8
  for (int i = 0; i < n; i += sum_lanes) {
    const double x = bit_cast<Real>(bit_cast<Key<Real>>(acc[i + lane]) & kept);
    total += which == 1 ? x * x : x;
  }
}

// buffer <- acc for a tile of n elements. Returns the tile's moments in the threads 0, 8, 16 and 24 of the warp.
template <class Stored, class Real>
HVS_FUNCTION double measure_tile(const Stored* gradient, Real* buffer, int n, Real scale, Quad<Real>* chunks) {
  const bool whole = aligned(gradient, alignof(Quad<Stored>)) && aligned(buffer, alignof(Quad<Real>));
  Real* const acc = chunks->x;
  Key<Real> largest = 0;
  double total = 0;
  for (int at = 0; at < n; at += chunk) {
    const int size = n - at < chunk ? n - at : chunk;
    const Key<Real> found = whole && size == chunk
                                ? accumulate_chunk(gradient + at, buffer + at, scale, chunks)
                                : accumulate_any_chunk(gradient + at, buffer + at, size, scale, acc);
    largest = found > largest ? found : largest;
    __syncwarp();
    add_chunk(acc, size, total);
    __syncwarp();
  }
  total = fold_lanes(total);
  const double size = bit_cast<Real>(largest_in_warp(largest));
  return threadIdx.x % 32 / sum_lanes == 3 ? size : total;
}

// Iterator over the tiles of the positions begin .. end, in ascending order.
template <class Real> struct Tiles {
  const Step<Real>& step;
  std::int64_t begin, end, at;
  int s;

  HVS_FUNCTION Tiles(const Step<Real>& step, std::int64_t begin, std::int64_t end, int first)
      : step(step), begin(begin), end(end), s(first) {
    enter();
  }
  HVS_FUNCTION void enter() {
    at = s >= step.count ? end : step.segments[s].start > begin ? step.segments[s].start : begin;
  }
  HVS_FUNCTION bool any() const { return at < end; }
  HVS_FUNCTION std::int64_t stop() const {
    const std::int64_t stop = step.segments[s].stop();
    return stop < end ? stop : end;
  }
  HVS_FUNCTION int size() const { return stop() - at < sum_tile ? int(stop() - at) : sum_tile; }
  HVS_FUNCTION void skip(int tiles) {
    for (; tiles > 0 && any(); --tiles) {
      at += sum_tile;
      if (at < stop()) continue;
      ++s;
      enter();
    }
  }
};

template <class Real> HVS_FUNCTION double measure_next(const Tiles<Real>& tiles, Quad<Real>* chunks) {
  if (!tiles.any()) return 0;
  const Step<Real>& step = tiles.step;
  const Segment segment = step.segments[tiles.s];
  const std::int64_t offset = tiles.at - segment.start;
  Real* const buffer = step.buffer + tiles.at;
  const int n = tiles.size();
  switch (segment.format) {
    case format_float32:
      return measure_tile(reinterpret_cast<const float*>(segment.data) + offset, buffer, n, step.scale, chunks);
    case format_float16:
      return measure_tile(reinterpret_cast<const Half*>(segment.data) + offset, buffer, n, step.scale, chunks);
    case format_bfloat16:
      return measure_tile(reinterpret_cast<const BFloat16*>(segment.data) + offset, buffer, n, step.scale, chunks);
    default:
      return measure_tile(reinterpret_cast<const double*>(segment.data) + offset, buffer, n, step.scale, chunks);
  }
}

// Scales the positions in begin .. end that no segment covers; `first` is the first segment that ends after `begin`.
template <class Real>
HVS_FUNCTION void scale_held(const Step<Real>& step, std::int64_t begin, std::int64_t end, int first) {
  if (step.scale == 1) return;
  for (int s = first; begin < end; ++s) {
    const std::int64_t start = s < step.count && step.segments[s].start < end ? step.segments[s].start : end;
    for (std::int64_t i = begin + threadIdx.x; i < start; i += block_threads) {
      step.buffer[i] = held(step.buffer[i], step.scale);
    }
    begin = s < step.count ? step.segments[s].stop() : end;
  }
}

// The larger of two nonnegative numbers; NaN counts as the largest.
HVS_FUNCTION double larger_magnitude(double a, double b) { return magnitude(b) > magnitude(a) ? b : a; }

// buffer <- acc; moments[m * gridDim.x + b] <- moment m of the active positions in block b of the bucket.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    measure(const Segment* segments, int count, Real* buffer, std::int64_t size, Real scale, double* moments) {
  __shared__ Quad<Real> chunks[block_warps][chunk_quads];
  __shared__ double found[block_warps][moments_of_tile];
  const Step<Real> step = {segments, count, buffer, size, scale};
  const std::int64_t begin = std::int64_t(blockIdx.x) * block_of_sums;
  const std::int64_t end = begin + std::int64_t(block_of_sums) < size ? begin + std::int64_t(block_of_sums) : size;
  const int first = first_behind(segments, count, begin), warp = threadIdx.x / 32, m = threadIdx.x;
  double total = 0;  // moment m, in the first threads
  for (Tiles<Real> tiles(step, begin, end, first); tiles.any(); tiles.skip(block_warps)) {
    Tiles<Real> mine = tiles;
    mine.skip(warp);
    const double moment = measure_next(mine, chunks[warp]);
    if (threadIdx.x % sum_lanes == 0) found[warp][threadIdx.x % 32 / sum_lanes] = moment;
    __syncthreads();
    for (int w = 0; m < moments_of_tile && w < block_warps; ++w) {
      total = m < 3 ? total + found[w][m] : larger_magnitude(total, found[w][m]);
    }
    __syncthreads();
  }
  if (m < moments_of_tile) moments[std::int64_t(m) * gridDim.x + blockIdx.x] = total;
  scale_held(step, begin, end, first);
}

// Combines the moments of a bucket's blocks, with one warp per moment.
__global__ void __launch_bounds__(32 * moments_of_tile)
    add_moments(const double* moments, std::int64_t blocks, double* results) {
  const int m = threadIdx.x / 32, lane = threadIdx.x % 32;
  double total = 0;
  if (m < 3) {
    total = add_in_order(moments + m * blocks, blocks);
  } else {
    for (std::int64_t i = lane; i < blocks; i += 32) total = larger_magnitude(total, moments[m * blocks + i]);
    total = bit_cast<double>(largest_in_warp(magnitude(total)));
  }
  if (lane == 0) results[m] = total;
}

// --- sums of squares -------------------------------------------------------------------------------------------------
//
// Eight threads process a tile, one lane each. They read 32 bytes together; each loads many elements before it adds
// any.

constexpr int batch = 16;
constexpr int tiles_of_block = block_threads / sum_lanes;

// The thread's lane in the sum of n squares.
template <class Stored> HVS_FUNCTION double square_lane(const Stored* x, int n) {
  double total = 0;
  for (int begin = threadIdx.x % sum_lanes; begin < n; begin += batch * sum_lanes) {
    Stored loaded[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) loaded[j] = begin + j * sum_lanes < n ? x[begin + j * sum_lanes] : Stored{};
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      const double wide = widen(loaded[j]);
      total += wide * wide;
    }
  }
  return total;
}

HVS_FUNCTION double square_lane(const Segment& segment, std::int64_t offset, int n) {
  switch (segment.format) {
    case format_float32: return square_lane(reinterpret_cast<const float*>(segment.data) + offset, n);
    case format_float16: return square_lane(reinterpret_cast<const Half*>(segment.data) + offset, n);
    case format_bfloat16: return square_lane(reinterpret_cast<const BFloat16*>(segment.data) + offset, n);
    default: return square_lane(reinterpret_cast<const double*>(segment.data) + offset, n);
  }
}

// squares <- sums of squares of `parts` parts of tensors.
__global__ void __launch_bounds__(block_threads)
    square(const Segment* segments, int count, std::int64_t parts, double* squares) {
  const std::int64_t number = std::int64_t(blockIdx.x) * tiles_of_block + threadIdx.x / sum_lanes;
  double total = 0;
  if (number < parts) {
    const Part part = part_of(segments, count, number, sum_tile);
    total = square_lane(segments[part.tensor], part.offset, part.size);
  }
  total = fold_lanes(total);
  if (number < parts && threadIdx.x % sum_lanes == 0) squares[number] = total;
}

constexpr int adding_threads = 512;

// Adds the parts of each tensor; `norms` has an element per tensor. Tensors do not wait for each other. If one tensor
// has most of the elements, this takes longer than reading it: two of its tiles are read in the time of one addition.
__global__ void __launch_bounds__(adding_threads)
    add_squares(const Segment* segments, int count, const double* squares, double* norms, double* result) {
  for (int s = threadIdx.x / 32; s < count; s += adding_threads / 32) {
    const std::int64_t parts = (std::int64_t(segments[s].length) + sum_tile - 1) / sum_tile;
    const double norm = add_in_order(squares + first_part(segments[s], s, sum_tile), parts);
    if (threadIdx.x % 32 == 0) norms[s] = norm;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const double total = add_in_order(norms, count);
  if (threadIdx.x == 0) *result = total;
}

constexpr int scored_at_once = 8;  // elements per thread

// The first segments that end after the first and after the last position of the thread block.
struct Neighbours {
  int first, last;
};

HVS_FUNCTION Neighbours find_neighbours(const Segment* segments, int count, std::int64_t begin, std::int64_t end) {
  __shared__ Neighbours found;
  if (threadIdx.x == 0) found.first = first_behind(segments, count, begin);
  if (threadIdx.x == 32) found.last = first_behind(segments, count, end);
  __syncthreads();
  return found;
}

// The thread's lane in the sum of squares of the n elements from `begin` on, where segments cover them. `s` is the
// first segment that ends after `begin`.
template <class Real>
HVS_FUNCTION double score_lane(const Segment* segments, int count, int s, const Real* buffer, std::int64_t begin,
                               int n) {
  std::int64_t start = s < count ? segments[s].start : begin + n, stop = s < count ? segments[s].stop() : begin + n;
  double total = 0;
  for (int first = threadIdx.x % sum_lanes; first < n; first += scored_at_once * sum_lanes) {
    Real x[scored_at_once];
#pragma unroll
    for (int j = 0; j < scored_at_once; ++j) {
      const int i = first + j * sum_lanes;
      x[j] = i < n ? buffer[begin + i] : Real(0);
    }
#pragma unroll
    for (int j = 0; j < scored_at_once; ++j) {
      const int i = first + j * sum_lanes;
      while (i < n && stop <= begin + i) {
        ++s;
        start = s < count ? segments[s].start : begin + n;
        stop = s < count ? segments[s].stop() : begin + n;
      }
      const double wide = x[j];
      if (start <= begin + i) total += wide * wide;
    }
  }
  return total;
}

// scores <- sums of squares of tiles, at positions that segments cover; `tiles_each` tiles per `length` positions.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    score(const Segment* segments, int count, const Real* buffer, std::int64_t size, std::int64_t length,
          std::uint32_t tiles_each, std::uint32_t tiles, double* scores) {
  const auto position = [&](std::uint32_t tile) {
    const std::int64_t at = tile / tiles_each * length + std::int64_t(tile % tiles_each) * sum_tile;
    return at < size ? at : size;
  };
  const std::uint32_t first = blockIdx.x * std::uint32_t(tiles_of_block), behind = first + tiles_of_block;
  const std::uint32_t tile = first + threadIdx.x / sum_lanes;
  const Neighbours near = find_neighbours(segments, count, position(first), position(behind < tiles ? behind : tiles));
  double total = 0;
  if (tile < tiles) {
    const std::int64_t begin = position(tile), left = (tile / tiles_each + 1) * length - begin;
    const std::int64_t end = left < sum_tile ? begin + left : begin + sum_tile;
    const int s = near.first + first_behind(segments + near.first, near.last - near.first, begin);
    total = score_lane(segments, count, s, buffer, begin, int((end < size ? end : size) - begin));
  }
  total = fold_lanes(total);
  if (tile < tiles && threadIdx.x % sum_lanes == 0) scores[tile] = total;
}

// Adds the scores of the tiles of each block, with one warp per block.
__global__ void __launch_bounds__(block_threads)
    add_scores(const double* tiles, std::int64_t tiles_each, std::int64_t blocks, double* scores) {
  const std::int64_t block = std::int64_t(blockIdx.x) * block_warps + threadIdx.x / 32;
  if (block >= blocks) return;
  const double total = add_in_order(tiles + block * tiles_each, tiles_each);
  if (threadIdx.x % 32 == 0) scores[block] = total;
}

// --- counts ----------------------------------------------------------------------------------------------------------

// Loads the keys of a thread's elements of a tile; -1 for positions that no segment covers. `s` is the first segment
// that ends after the tile's begin.
template <class Real>
HVS_FUNCTION void load_keys(const Step<const Real>& step, int s, std::int64_t begin, Key<Real> (&keys)[quads][quad]) {
  const bool inside = s < step.count && step.segments[s].start <= begin && begin + tile_size <= step.segments[s].stop();
  if (inside && aligned(step.buffer, alignof(Quad<Real>))) {
    Quad<Real> x[quads];
#pragma unroll
    for (int q = 0; q < quads; ++q) x[q] = *reinterpret_cast<const Quad<Real>*>(step.buffer + quad_begin(begin, q));
#pragma unroll
    for (int q = 0; q < quads; ++q) {
#pragma unroll
      for (int i = 0; i < quad; ++i) keys[q][i] = magnitude(x[q].x[i]);
    }
    return;
  }
#pragma unroll
  for (int q = 0; q < quads; ++q) {
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      const std::int64_t at = quad_begin(begin, q) + i;
      while (s < step.count && step.segments[s].stop() <= at) ++s;
      const bool covered = s < step.count && step.segments[s].start <= at;
      keys[q][i] = covered ? magnitude(step.buffer[at]) : Key<Real>(-1);
    }
  }
}

// Adds to each of `most` counts the number of magnitudes inside the segments that reach its threshold. Each block
// processes an equal share of adjacent tiles.
template <class Real, int most>
__global__ void __launch_bounds__(block_threads)
    count_reaching(const Segment* segments, int count, const Real* buffer, std::int64_t size, const Real* thresholds,
                   unsigned long long* counts) {
  __shared__ std::uint32_t totals[block_warps][most];
  const Step<const Real> step = {segments, count, buffer, size, 0};
  Key<Real> low[most];
  std::uint32_t found[most];
#pragma unroll
  for (int t = 0; t < most; ++t) {
    low[t] = magnitude(thresholds[t]);
    found[t] = 0;
  }
  const std::int64_t tiles = (size + tile_size - 1) / tile_size;
  std::int64_t tile = tiles * blockIdx.x / gridDim.x;
  const std::int64_t last = tiles * (std::int64_t(blockIdx.x) + 1) / gridDim.x;
  int s = first_behind(segments, count, tile * tile_size);
  for (; tile < last; ++tile) {
    while (s < count && segments[s].stop() <= tile * tile_size) ++s;
    Key<Real> keys[quads][quad];
    load_keys<Real>(step, s, tile * tile_size, keys);
#pragma unroll
    for (int q = 0; q < quads; ++q) {
#pragma unroll
      for (int i = 0; i < quad; ++i) {
#pragma unroll
        for (int t = 0; t < most; ++t) found[t] += keys[q][i] >= low[t];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < most; ++t) {
    const std::uint32_t total = sum_over_warp(found[t]);
    if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32][t] = total;
  }
  __syncthreads();
  if (threadIdx.x < most) {
    unsigned long long total = 0;
    for (int w = 0; w < block_warps; ++w) total += totals[w][threadIdx.x];
    if (total > 0) atomicAdd(&counts[threadIdx.x], total);
  }
}

// --- samples ---------------------------------------------------------------------------------------------------------

// values <- acc, as accumulate would store it, at the active positions number start, start + stride, ...
template <class Real>
__global__ void __launch_bounds__(block_threads)
    sample(const Segment* segments, int count, const Real* buffer, Real scale, std::int64_t start, std::int64_t stride,
           std::int64_t samples, Real* values) {
  const std::int64_t i = std::int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i >= samples) return;
  const std::int64_t number = start + i * stride;
  const Segment segment = segments[holding_active(segments, count, number)];
  const std::int64_t at = number - segment.before;
  values[i] = accumulated(buffer[segment.start + at], load<Real>(segment, at), scale);
}

// --- the largest magnitude -------------------------------------------------------------------------------------------

constexpr int searched_part = 4096;  // elements of a tensor per thread block

template <class Word> struct alignas(16) Words {
  Word x[16 / sizeof(Word)];
};

// The largest magnitude among the thread's elements, as an integer. Reads 16 bytes at a time, except before the first
// and after the last multiple of 16.
template <class Word> HVS_FUNCTION Word largest_word(const Segment& segment, const Part& part) {
  constexpr int each = 16 / sizeof(Word);
  constexpr Word magnitude = Word(~Word(0)) >> 1;
  const Word* const x = reinterpret_cast<const Word*>(segment.data) + part.offset;
  const int n = part.size, lead = int((16 - reinterpret_cast<std::size_t>(x) % 16) % 16 / sizeof(Word));
  const int head = lead < n ? lead : n, whole = (n - head) / each;
  const auto* const words = reinterpret_cast<const Words<Word>*>(x + head);
  Word found = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += block_threads) {
    const Words<Word> w = words[i];
#pragma unroll
    for (int j = 0; j < each; ++j) found = max(found, Word(w.x[j] & magnitude));
  }
  const int tail = head + whole * each;
  for (int i = threadIdx.x; i < head; i += block_threads) found = max(found, Word(x[i] & magnitude));
  for (int i = tail + int(threadIdx.x); i < n; i += block_threads) found = max(found, Word(x[i] & magnitude));
  return found;
}

// The largest magnitude, widened to float64, which keeps the order of the bits.
HVS_FUNCTION double largest_of(const Segment& segment, const Part& part) {
  switch (segment.format) {
    case format_float32: return float_of(largest_word<std::uint32_t>(segment, part));
    case format_float16: return widen(Half{largest_word<std::uint16_t>(segment, part)});
    case format_bfloat16: return widen(BFloat16{largest_word<std::uint16_t>(segment, part)});
    default: return bit_cast<double>(largest_word<std::uint64_t>(segment, part));
  }
}

// Stores the bits of the largest magnitude, of infinity or of NaN in `result`, which is zero at the start.
__global__ void __launch_bounds__(block_threads)
    find_largest(const Segment* segments, int count, unsigned long long* result) {
  const Part part = part_of(segments, count, blockIdx.x, searched_part);
  auto found = bit_cast<unsigned long long>(largest_of(segments[part.tensor], part));
  for (int distance = 16; distance > 0; distance /= 2) {
    found = max(found, __shfl_xor_sync(full_warp, found, distance));
  }
  if (threadIdx.x % 32 == 0 && found > 0) atomicMax(result, found);
}

}  // namespace hvs
