// Operations on one sparse vector. No index causes an access outside the arrays: entries out of range are skipped.
#include "merge.cuh"
#include "scan.cuh"
#include "segments.cuh"

namespace hvs {

constexpr int batch = 4;  // elements per thread, block_threads apart, whose loads overlap

// The first of the thread's `batch` elements.
HVS_FUNCTION std::int64_t first_element() {
  return std::int64_t(blockIdx.x) * (batch * block_threads) + std::int64_t(threadIdx.x);
}

// --- add -----------------------------------------------------------------------------------------------------------

// buffer[indices] += values; null indices: values cover all positions.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    add(const std::int32_t* indices, const Real* values, std::int64_t count, Real* buffer, std::int64_t size) {
  const std::int64_t first = first_element();
  std::int64_t at[batch];
  Real sum[batch];
  for (int i = 0; i < batch; ++i) {
    const std::int64_t entry = first + i * block_threads;
    at[i] = entry >= count ? -1 : indices ? indices[entry] : entry;
    if (at[i] >= size) at[i] = -1;
    sum[i] = at[i] < 0 ? Real(0) : values[entry];
  }
  for (int i = 0; i < batch; ++i) {
    if (at[i] >= 0) sum[i] = buffer[at[i]] + sum[i];
  }
  for (int i = 0; i < batch; ++i) {
    if (at[i] >= 0) buffer[at[i]] = sum[i];
  }
}

// --- scatter -------------------------------------------------------------------------------------------------------

constexpr int part = 4096;  // active positions per block

HVS_FUNCTION int bytes_of(std::int32_t format) {
  return format == format_float64 ? 8 : format == format_float32 ? 4 : 2;
}

struct alignas(16) Zeros {
  std::uint64_t x[2];
};

// Sets bytes to zero, with all threads of the block.
HVS_FUNCTION void clear_bytes(char* begin, char* end) {
  char* p = begin + std::int64_t(threadIdx.x);
  const std::size_t beside = reinterpret_cast<std::size_t>(begin) % sizeof(Zeros);
  char* const from = beside == 0 ? begin : begin + (sizeof(Zeros) - beside);
  for (; p < from && p < end; p += block_threads) *p = 0;
  if (from >= end) return;
  const std::int64_t whole = (end - from) / std::int64_t(sizeof(Zeros));
  for (std::int64_t i = threadIdx.x; i < whole; i += block_threads) reinterpret_cast<Zeros*>(from)[i] = {};
  for (p = from + whole * std::int64_t(sizeof(Zeros)) + threadIdx.x; p < end; p += block_threads) *p = 0;
}

// Calls work(segment, begin, end) for the elements of each segment that are in this block's part.
template <class Work> HVS_FUNCTION void in_part(const Segment* segments, int count, std::int64_t active, Work work) {
  const std::int64_t begin = std::int64_t(blockIdx.x) * part, end = min(begin + part, active);
  for (int s = holding_active(segments, count, begin); s < count && segments[s].before < end; ++s) {
    const Segment segment = segments[s];
    const std::int64_t before = segment.before, length = segment.length;
    work(segment, max(begin - before, std::int64_t(0)), min(end - before, length));
  }
}

__global__ void __launch_bounds__(block_threads) clear(const Segment* segments, int count, std::int64_t active) {
  in_part(segments, count, active, [](const Segment& segment, std::int64_t begin, std::int64_t end) {
    const int width = bytes_of(segment.format);
    clear_bytes(segment.data + begin * width, segment.data + end * width);
  });
}

// segments <- values * scale, where values cover all positions.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    fill(const Segment* segments, int count, std::int64_t active, const Real* values, Real scale) {
  in_part(segments, count, active, [&](const Segment& segment, std::int64_t begin, std::int64_t end) {
    for (std::int64_t first = begin + threadIdx.x; first < end; first += batch * block_threads) {
      Real x[batch];
      for (int i = 0; i < batch; ++i) {
        const std::int64_t at = first + i * block_threads;
        x[i] = at < end ? values[segment.start + at] : Real(0);
      }
      for (int i = 0; i < batch; ++i) {
        const std::int64_t at = first + i * block_threads;
        if (at < end) store(segment, at, x[i] * scale);
      }
    }
  });
}

// segments[indices] <- values * scale
template <class Real>
__global__ void __launch_bounds__(block_threads)
    scatter(const Segment* segments, int count, const std::int32_t* indices, const Real* values, std::int64_t entries,
            Real scale) {
  const std::int64_t first = first_element();
  std::int32_t at[batch];
  Real x[batch];
  for (int i = 0; i < batch; ++i) {
    const std::int64_t entry = first + i * block_threads;
    at[i] = entry < entries ? indices[entry] : -1;
    x[i] = entry < entries ? values[entry] : Real(0);
  }
  for (int i = 0; i < batch; ++i) {
    const int s = first_behind(segments, count, at[i]);
    if (s < count && segments[s].start <= at[i]) store(segments[s], at[i] - segments[s].start, x[i] * scale);
  }
}

// --- exclude -------------------------------------------------------------------------------------------------------

constexpr int run = 4;  // adjacent entries per thread

// The position of the first index of at least `index` in indices[low .. high].
HVS_FUNCTION std::int64_t first_from(const std::int32_t* indices, std::int64_t low, std::int64_t high,
                                     std::int64_t index) {
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (indices[middle] < index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Indices plus an offset.
__global__ void __launch_bounds__(block_threads)
    shift(const std::int32_t* indices, std::int64_t count, std::int32_t by, std::int32_t* shifted) {
  const std::int64_t i = std::int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i < count) shifted[i] = indices[i] + by;
}

// Values at positions, times a factor; 0 beyond the buffer.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    gather(const Real* buffer, std::int64_t size, const std::int32_t* positions, std::int64_t count, Real factor,
           Real* values) {
  const std::int64_t i = std::int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t position = positions[i];
  values[i] = position >= 0 && position < size ? factor * buffer[position] : Real(0);
}

// The number of indices below each position.
__global__ void __launch_bounds__(block_threads)
    places(const std::int32_t* indices, std::int64_t count, const std::int32_t* positions, std::int64_t number,
           std::int64_t* found) {
  const std::int64_t i = std::int64_t(blockIdx.x) * block_threads + threadIdx.x;
  if (i < number) found[i] = first_from(indices, 0, count, positions[i]);
}

// State shared by the blocks and the host; all bytes are zero at the start.
struct Kept {
  std::int64_t count;
  std::uint32_t ticket;
};

// Appends the entries of a tile that stay to (kept, kept_values); `stays` has a bit for each of the thread's entries,
// which begin at `first`.
template <class Real>
HVS_FUNCTION void append(const std::int32_t* indices, const Real* values, std::int64_t first, std::uint32_t stays,
                         std::int64_t tile, bool last, Kept* state, Status* statuses, std::int32_t* kept,
                         Real* kept_values) {
  const Prefix<std::uint32_t> prefix = scan_block(std::uint32_t(__popc(stays)));
  const std::int64_t before = std::int64_t(look_back(statuses, tile, prefix.total));
  if (last && threadIdx.x == 0) state->count = before + prefix.total;
  std::int64_t to = before + prefix.before;
  for (int i = 0; i < run; ++i) {
    if (!(stays >> i & 1)) continue;
    kept[to] = indices[first + i];
    kept_values[to++] = values[first + i];
  }
}

// Copies the entries whose magnitude is at least `least` to (kept, kept_values), one tile per block.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    reaching(const std::int32_t* indices, const Real* values, std::int64_t count, Real least, Kept* state,
             Status* statuses, std::int32_t* kept, Real* kept_values) {
  const std::int64_t tile = take_ticket(&state->ticket), begin = tile * (run * block_threads);
  const std::int64_t first = begin + std::int64_t(threadIdx.x) * run;
  std::uint32_t stays = 0;
  for (int i = 0; i < run && first + i < count; ++i) {
    const Real value = values[first + i];
    stays |= std::uint32_t(value >= least || -value >= least) << i;
  }
  const bool last = begin + run * block_threads >= count;
  append(indices, values, first, stays, tile, last, state, statuses, kept, kept_values);
}

// Copies the entries whose index is not among `others` to (kept, kept_values), one tile per block.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    exclude(const std::int32_t* indices, const Real* values, std::int64_t count, const std::int32_t* others,
            std::int64_t other_count, Kept* state, Status* statuses, std::int32_t* kept, Real* kept_values) {
  const std::int64_t tile = take_ticket(&state->ticket), begin = tile * (run * block_threads);
  const std::int64_t end = min(begin + run * block_threads, count);
  // Only this range of `others` can contain indices of the tile.
  __shared__ std::int64_t range[2];
  if (threadIdx.x < 2) {
    const std::int64_t limit = threadIdx.x == 0 ? indices[begin] : std::int64_t(indices[end - 1]) + 1;
    range[threadIdx.x] = first_from(others, 0, other_count, limit);
  }
  __syncthreads();
  const std::int64_t first = begin + std::int64_t(threadIdx.x) * run;
  std::uint32_t stays = 0;
  std::int64_t other = range[0];
  for (int i = 0; i < run && first + i < end; ++i) {
    const std::int32_t index = indices[first + i];
    other = first_from(others, other, range[1], index);
    stays |= std::uint32_t(other >= range[1] || others[other] != index) << i;
  }
  append(indices, values, first, stays, tile, end == count, state, statuses, kept, kept_values);
}

// --- count_magnitudes ----------------------------------------------------------------------------------------------

constexpr int counters = 8192;  // counters per block: that many bins, or copies of fewer bins

// Counts each digit of the magnitudes: the `bits` bits above the lowest `shift` bits, for keys that match the prefix in
// all higher bits. Adjacent lanes count in different copies, so that equal digits do not wait for each other.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    count(const Real* values, std::int64_t size, Key<Real> prefix, int shift, int bits, std::uint32_t* counts) {
  __shared__ std::uint32_t histogram[counters];
  const int bins = 1 << bits, lane = int(threadIdx.x) % 32, copies = min(counters >> bits, 32);
  const Key<Real> mask = Key<Real>(bins - 1);
  for (int i = int(threadIdx.x); i < bins * copies; i += block_threads) histogram[i] = 0;
  __syncthreads();
  for (std::int64_t first = first_element(); first < size; first += std::int64_t(gridDim.x) * (batch * block_threads)) {
    Real x[batch];
    for (int i = 0; i < batch; ++i) {
      const std::int64_t at = first + i * block_threads;
      x[i] = at < size ? values[at] : Real(0);
    }
    for (int i = 0; i < batch; ++i) {
      const Key<Real> key = magnitude(x[i]);
      if (first + i * block_threads >= size || (key ^ prefix) >> shift > mask) continue;
      const int bin = int(key >> shift & mask);
      atomicAdd(copies == 0 ? &counts[bin] : &histogram[bin * copies + lane % copies], 1u);
    }
  }
  __syncthreads();
  if (copies == 0) return;
  for (int bin = int(threadIdx.x); bin < bins; bin += block_threads) {
    std::uint32_t sum = 0;
    for (int i = 0; i < copies; ++i) sum += histogram[bin * copies + (lane + i) % copies];  // lanes in different banks
    if (sum > 0) atomicAdd(&counts[bin], sum);
  }
}

}  // namespace hvs
