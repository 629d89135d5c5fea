// Exact top-k by magnitude, fused with error feedback, like the CPU kernel of the same name: one pass over gradients
// and buffer, several over the few candidates. No launch depends on another kernel's result, so the host never waits.
//
// draw, estimate: find a threshold that slightly more than k magnitudes reach, from a stratified random sample.
// sweep: buffer <- acc; appends the candidates, the entries that reach the threshold, in ascending order.
// digit: one step of radix selection, which narrows the k-th magnitude down to a range of 2^width keys.
// compact: moves the k largest out, in ascending order.
//
// digit and compact read the candidates, or all of acc if there are fewer than k candidates or more than fit.
#include "tiles.cuh"

namespace hvs {

constexpr int digit_bits = 11, digit_bins = 1 << digit_bits;
template <class Real> constexpr int digits = (Bits<Real>::width + digit_bits - 1) / digit_bits;

// State of the search: the k-th key is the rank-th largest (from 1) of the keys in base .. base + 2^width.
template <class Real> struct Search {
  Key<Real> base;
  std::int64_t rank;
  std::int32_t width;
  std::int32_t all;  // whether to search all of acc instead of the candidates
};

// State shared by the kernels of one selection; all bytes are zero at the start.
template <class Real> struct Plan {
  std::uint32_t sweep_ticket, compact_ticket;
  std::int64_t found;  // candidates, including those that did not fit
  Key<Real> low;       // threshold of the candidates
  std::int32_t shift;  // the bins of their histogram are 2^shift wide and begin at low
  Search<Real> searches[digits<Real>];
  std::uint32_t sampled[digit_bins];                         // histogram of the sample's first digit
  std::uint32_t histograms[digits<Real> + 1][digit_bins];  // of the candidates, then of each digit
};

constexpr int plan_bytes = 80 << 10;  // bytes that the host allocates
static_assert(sizeof(Plan<float>) <= plan_bytes && sizeof(Plan<double>) <= plan_bytes, "the host allots too little");

// Input of the selection, after accumulation.
template <class Real> struct Source {
  const Real* values;  // candidates, or entries of a vector
  std::int64_t count;  // number of values
  const Segment* segments;
  int segment_count;
  const Real* buffer;
  std::int64_t size;
};

// The bin of the rank-th largest key in a histogram of all keys, returned to the entire block.
struct Found {
  std::int32_t bin;
  std::int64_t above;  // keys in higher bins
};

HVS_FUNCTION Found find_bin(const std::uint32_t* histogram, std::int64_t rank) {
  __shared__ Found found;
  constexpr int mine = digit_bins / block_threads;
  const int top = digit_bins - 1 - int(threadIdx.x) * mine;  // this thread's bins are top, top - 1, ...
  std::int64_t sum = 0;
  for (int i = 0; i < mine; ++i) sum += histogram[top - i];
  const Prefix<std::int64_t> prefix = scan_block(sum);
  if (threadIdx.x == 0) found = {0, prefix.total - histogram[0]};  // if there are fewer keys than rank
  __syncthreads();
  if (prefix.before < rank && rank <= prefix.before + sum) {
    std::int64_t above = prefix.before;
    int bin = top;
    while (above + histogram[bin] < rank) above += histogram[bin--];
    found = {bin, above};
  }
  __syncthreads();
  const Found result = found;
  __syncthreads();
  return result;
}

template <class Real> HVS_FUNCTION int digit_shift(const Search<Real>& search) {
  return search.width > digit_bits ? search.width - digit_bits : 0;
}

// The search after evaluating the histogram of its next digit.
template <class Real> HVS_FUNCTION Search<Real> narrow(Search<Real> search, const std::uint32_t* histogram) {
  if (search.width == 0) return search;
  const int shift = digit_shift(search);
  const Found found = find_bin(histogram, search.rank);
  search.base += Key<Real>(found.bin) << shift;
  search.rank -= found.above;
  search.width = shift;
  return search;
}

// Counts the key of x in a histogram of the search's next digit, if it is in the search's range.
template <class Real>
HVS_FUNCTION void count_key(const Search<Real>& search, Real x, std::uint32_t* histogram) {
  using Unsigned = typename Bits<Real>::Unsigned;
  const Key<Real> key = magnitude(x);
  const Unsigned offset = Unsigned(key) - Unsigned(search.base);
  if (key >= search.base && offset >> search.width == 0) atomicAdd(&histogram[offset >> digit_shift(search)], 1u);
}

HVS_FUNCTION void clear(std::uint32_t* histogram) {
  for (int bin = threadIdx.x; bin < digit_bins; bin += block_threads) histogram[bin] = 0;
  __syncthreads();
}

HVS_FUNCTION void add_to(std::uint32_t* total, const std::uint32_t* histogram) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < digit_bins; bin += block_threads) {
    if (histogram[bin] > 0) atomicAdd(&total[bin], histogram[bin]);
  }
}

// --- the sample ----------------------------------------------------------------------------------------------------

// A 32-bit hash (the finaliser of MurmurHash3), so that the sample does not alias with periodic gradients.
HVS_FUNCTION std::uint32_t hash(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The active position sampled from stratum i of `strata`; active < 2^31 and strata <= 2^16.
HVS_FUNCTION std::int64_t sampled_number(std::uint32_t i, std::uint32_t strata, std::int64_t active) {
  const std::uint64_t width = (std::uint64_t(active) << 32) / strata;  // with 32 fractional bits
  return std::int64_t((i * width + (width >> 16) * (hash(i) >> 16)) >> 32);
}

// Samples acc as accumulate would store it, and counts the first digits of the sampled keys.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    draw(const Segment* segments, int count, const Real* source, Real scale, Real* velocities, Real momentum,
         Real share, Real fresh, Real weight, std::int64_t active, int strata, Plan<Real>* plan, Real* sample) {
  const Velocity<Real> velocity = {velocities, momentum, share, fresh, weight};
  __shared__ std::uint32_t histogram[digit_bins];
  clear(histogram);
  const int i = blockIdx.x * block_threads + threadIdx.x;
  if (i < strata) {
    const std::int64_t number = sampled_number(std::uint32_t(i), std::uint32_t(strata), active);
    const Segment segment = segments[holding_active(segments, count, number)];
    const std::int64_t at = number - segment.before;
    Real added = load<Real>(segment, at);
    if (velocities) added = velocity.added(velocity.updated(velocities[segment.start + at], added), added);
    const Real x = accumulated(source[segment.start + at], added, scale);
    sample[i] = x;
    count_key(Search<Real>{0, 0, Bits<Real>::width, 0}, x, histogram);
  }
  add_to(plan->sampled, histogram);
}

// Finds the candidates' threshold. `low` and `high` are the ranks in the sample of a low and a high estimate of the
// k-th magnitude; `high` is 0 if there is no high estimate. Runs in one block.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    estimate(Plan<Real>* plan, const Real* sample, int strata, int low, int high) {
  __shared__ std::uint32_t histogram[digit_bins];
  clear(histogram);
  const Search<Real> whole = {0, low, Bits<Real>::width, 0};
  const Search<Real> first = narrow(whole, plan->sampled);
  for (int i = threadIdx.x; i < strata; i += block_threads) count_key(first, sample[i], histogram);
  __syncthreads();
  const Search<Real> second = narrow(first, histogram);
  // Most candidates are below `upper`; the last bin holds all others.
  Key<Real> upper = largest_key<Real>;
  if (high > 0) {
    const Search<Real> coarse = narrow(Search<Real>{0, high, Bits<Real>::width, 0}, plan->sampled);
    upper = coarse.base + ((Key<Real>(1) << coarse.width) - 1);
  }
  if (threadIdx.x == 0) {
    int shift = 0;
    while ((upper - second.base) >> shift >= digit_bins - 1) ++shift;
    plan->low = second.base;
    plan->shift = shift;
  }
}

// Sets the threshold that the caller passes.
template <class Real> __global__ void set_threshold(Plan<Real>* plan, Key<Real> low) {
  if (threadIdx.x == 0) plan->low = low;
}

// --- the pass over gradients and buffer ----------------------------------------------------------------------------

// `moving`: with a velocity; `velocities` is null otherwise.
template <class Real, int moving>
__global__ void __launch_bounds__(block_threads)
    accumulate(const Segment* segments, int count, Real* buffer, std::int64_t size, Real scale, const Real* source,
               int clear, Real* velocities, Real momentum, Real share, Real fresh, Real weight) {
  const Velocity<Real> velocity = {velocities, momentum, share, fresh, weight};
  const Step<Real> step = {segments, count, buffer, size, scale, source, clear != 0, velocity};
  for (std::int64_t tile = blockIdx.x; tile * tile_size < size; tile += gridDim.x) {
    Real acc[quads][quad];
    accumulate_tile<moving != 0>(step, tile * tile_size, acc);
  }
}

// buffer <- acc, and collects the candidates, whose magnitudes reach plan->low; only the first `room` are stored.
template <class Real, int moving>
__global__ void __launch_bounds__(block_threads)
    sweep(const Segment* segments, int count, Real* buffer, std::int64_t size, Real scale, const Real* source,
          int clear, Real* velocities, Real momentum, Real share, Real fresh, Real weight, Plan<Real>* plan, Status* statuses,
          std::int32_t* indices, Real* values, std::int64_t room) {
  const Velocity<Real> velocity = {velocities, momentum, share, fresh, weight};
  const Step<Real> step = {segments, count, buffer, size, scale, source, clear != 0, velocity};
  const std::int64_t tile = take_ticket(&plan->sweep_ticket), begin = tile * tile_size;
  const Key<Real> low = plan->low;
  Real acc[quads][quad];
  std::uint32_t taken = accumulate_tile<moving != 0>(step, begin, acc);
  std::uint64_t counts = 0;  // 16 bits per quad
#pragma unroll
  for (int q = 0; q < quads; ++q) {
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      const int bit = q * quad + i;
      if (magnitude(acc[q][i]) < low) taken &= ~(1u << bit);
      counts += std::uint64_t(taken >> bit & 1) << (16 * q);
    }
  }
  const Prefix<std::uint64_t> prefix = scan_block(counts);
  std::uint32_t found = 0;
#pragma unroll
  for (int q = 0; q < quads; ++q) found += std::uint32_t(prefix.total >> (16 * q)) & 0xffff;
  std::int64_t at = std::int64_t(look_back(statuses, tile, found));
  if (begin + tile_size >= size && threadIdx.x == 0) plan->found = at + found;
#pragma unroll
  for (int q = 0; q < quads; ++q) {
    std::int64_t to = at + (std::uint32_t(prefix.before >> (16 * q)) & 0xffff);
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      if (!(taken >> (q * quad + i) & 1)) continue;
      if (to < room) {
        indices[to] = std::int32_t(quad_begin(begin, q) + i);
        values[to] = acc[q][i];
      }
      const Key<Real> bin = (magnitude(acc[q][i]) - low) >> plan->shift;
      atomicAdd(&plan->histograms[0][bin < digit_bins ? bin : digit_bins - 1], 1u);
      ++to;
    }
    at += std::uint32_t(prefix.total >> (16 * q)) & 0xffff;
  }
}

// --- the exact threshold -------------------------------------------------------------------------------------------

// The initial search for the k-th key.
template <class Real>
HVS_FUNCTION Search<Real> begin_search(const Plan<Real>& plan, std::int64_t k, std::int64_t room) {
  if (plan.found < k || plan.found > room) return {0, k, Bits<Real>::width, 1};
  const Found found = find_bin(plan.histograms[0], k);
  const bool last = found.bin == digit_bins - 1;  // it also counts all higher keys
  return {plan.low + (Key<Real>(found.bin) << plan.shift), k - found.above, last ? Bits<Real>::width : plan.shift, 0};
}

template <class Real>
HVS_FUNCTION void count_everywhere(const Source<Real>& source, const Search<Real>& search, std::uint32_t* histogram) {
  for (std::int64_t begin = std::int64_t(blockIdx.x) * block_threads; begin < source.size;
       begin += std::int64_t(gridDim.x) * block_threads) {
    const std::int64_t at = begin + threadIdx.x;
    const int s = first_behind(source.segments, source.segment_count, at);
    const bool inside = s < source.segment_count && source.segments[s].start <= at && at < source.size;
    if (inside) count_key(search, source.buffer[at], histogram);
  }
}

template <class Real>
HVS_FUNCTION void count_listed(const Source<Real>& source, const Search<Real>& search, std::uint32_t* histogram) {
  for (std::int64_t i = std::int64_t(blockIdx.x) * block_threads + threadIdx.x; i < source.count;
       i += std::int64_t(gridDim.x) * block_threads) {
    count_key(search, source.values[i], histogram);
  }
}

// Evaluates the previous digit and counts digit number `level` of the k-th key. Searches `listed` values unless that is
// negative, else the candidates, of which `room` fit, or the entire buffer.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    digit(int level, Plan<Real>* plan, const Real* values, std::int64_t listed, std::int64_t room, std::int64_t k,
          const Segment* segments, int count, const Real* buffer, std::int64_t size) {
  __shared__ std::uint32_t histogram[digit_bins];
  const Search<Real> search = level > 0    ? narrow(plan->searches[level - 1], plan->histograms[level])
                              : listed < 0 ? begin_search(*plan, k, room)
                                           : Search<Real>{0, k, Bits<Real>::width, 0};
  if (blockIdx.x == 0 && threadIdx.x == 0) plan->searches[level] = search;
  if (search.width == 0) return;
  clear(histogram);
  const Source<Real> source = {values, listed < 0 ? plan->found : listed, segments, count, buffer, size};
  if (search.all) {
    count_everywhere(source, search, histogram);
  } else {
    count_listed(source, search, histogram);
  }
  add_to(plan->histograms[level + 1], histogram);
}

// --- moving the largest out ----------------------------------------------------------------------------------------

// The entries to take: all keys above the threshold, and the first `ties` that equal it.
template <class Real> struct Cut {
  Key<Real> threshold;
  std::int64_t ties;
  bool all;  // whether to take from all of acc instead of the candidates
};

// Outputs. rest_indices and buffer may be null.
template <class Real> struct Target {
  std::int32_t* indices;
  Real* values;
  std::int32_t* rest_indices;
  Real* rest_values;
  Real* buffer;  // becomes zero where an entry is taken
};

// A thread's entries in a row of quad * block_threads, with a bit per entry.
template <class Real> struct Entries {
  Real x[quad];
  std::uint32_t there, greater, equal;

  HVS_FUNCTION std::uint32_t counts() const { return std::uint32_t(__popc(greater) | __popc(equal) << 16); }
};

constexpr int row_size = quad * block_threads;

template <class Real>
HVS_FUNCTION Entries<Real> compared(const Source<Real>& source, const Cut<Real>& cut, std::int64_t first) {
  const std::int64_t end = cut.all ? source.size : source.count;
  Entries<Real> row = {};
#pragma unroll
  for (int i = 0; i < quad; ++i) {
    const std::int64_t at = first + i;
    if (at >= end) continue;
    if (cut.all) {
      const int s = first_behind(source.segments, source.segment_count, at);
      if (s >= source.segment_count || source.segments[s].start > at) continue;
    }
    row.x[i] = cut.all ? source.buffer[at] : source.values[at];
    row.there |= 1u << i;
    row.greater |= std::uint32_t(magnitude(row.x[i]) > cut.threshold) << i;
    row.equal |= std::uint32_t(magnitude(row.x[i]) == cut.threshold) << i;
  }
  return row;
}

// Moves a row's entries; `above` and `ties` count the greater and the equal ones before the thread's.
template <class Real>
HVS_FUNCTION void move_row(const Entries<Real>& row, const std::int32_t* indices, const Cut<Real>& cut,
                           std::int64_t first, std::uint32_t above, std::uint32_t ties, const Target<Real>& target) {
#pragma unroll
  for (int i = 0; i < quad; ++i) {
    if (!(row.there >> i & 1)) continue;
    const std::int64_t to = above + (ties < cut.ties ? ties : cut.ties);
    const bool taken = (row.greater >> i & 1) || ((row.equal >> i & 1) && ties < cut.ties);
    const std::int32_t index = cut.all ? std::int32_t(first + i) : indices[first + i];
    if (taken) {
      target.indices[to] = index;
      target.values[to] = row.x[i];
      if (target.buffer) target.buffer[index] = 0;
    } else if (target.rest_indices) {
      target.rest_indices[first + i - to] = index;
      target.rest_values[first + i - to] = row.x[i];
    }
    above += row.greater >> i & 1;
    ties += row.equal >> i & 1;
  }
}

// Compacts a tile of rows, in order. Of several rows the first pass only counts, and the second reads them again.
template <class Real>
HVS_FUNCTION void compact_tile(const Source<Real>& source, const std::int32_t* indices, const Cut<Real>& cut,
                               std::int64_t tile, int rows, Status* statuses, const Target<Real>& target) {
  const std::int64_t begin = tile * rows * row_size + std::int64_t(threadIdx.x) * quad;
  std::uint32_t counts = 0;  // of each kind at most tile_size, so that both fit
#pragma unroll 1
  for (int r = 0; r < rows; ++r) counts += compared(source, cut, begin + r * row_size).counts();
  const std::uint32_t total = scan_block(counts).total;
  const std::uint64_t before = look_back(statuses, tile, two_counts(total & 0xffff, total >> 16));
  std::uint32_t above = low_count(before), ties = high_count(before);
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    const std::int64_t first = begin + r * row_size;
    const Entries<Real> row = compared(source, cut, first);
    const Prefix<std::uint32_t> prefix = scan_block(row.counts());
    move_row(row, indices, cut, first, above + (prefix.before & 0xffff), ties + (prefix.before >> 16), target);
    above += prefix.total & 0xffff;
    ties += prefix.total >> 16;
  }
}

// Moves the k largest entries, or with `threshold` >= 0 all that reach it, to (taken, taken_values), and the remaining
// entries of a list to (rest, rest_values). `listed`, `room` and `buffer` are as for digit; taken entries become zero
// in the buffer.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    compact(Plan<Real>* plan, Status* statuses, const std::int32_t* indices, const Real* values, std::int64_t listed,
            std::int64_t room, Key<Real> threshold, const Segment* segments, int count, Real* buffer,
            std::int64_t size, std::int32_t* taken, Real* taken_values, std::int32_t* rest, Real* rest_values) {
  Cut<Real> cut = {threshold, size, plan->found > room};
  if (threshold < 0) {
    const int last = digits<Real> - 1;
    const Search<Real> search = narrow(plan->searches[last], plan->histograms[last + 1]);
    cut = {search.base, search.rank, search.all != 0};
  }
  const Source<Real> source = {values, listed < 0 ? plan->found : listed, segments, count, buffer, size};
  const Target<Real> target = {taken, taken_values, rest, rest_values, buffer};
  const std::int64_t end = cut.all ? size : source.count;
  const int rows = cut.all ? tile_size / row_size : 1;  // the statuses of all of acc would take half a percent of it
  for (;;) {
    const std::int64_t tile = take_ticket(&plan->compact_ticket);
    if (tile * rows * row_size >= end) return;
    compact_tile(source, indices, cut, tile, rows, statuses, target);
  }
}

// --- take: 12 bytes per position, 8 if all are taken ---------------------------------------------------------------

// values <- buffer at `taken` ascending positions (null: 0 .. taken), and sets the buffer to zero there. Positions
// outside all segments keep their buffer entry and get the value zero.
template <class Real>
__global__ void take(const Segment* segments, int count, const std::int32_t* positions, std::int64_t taken, Real* buffer,
                     std::int64_t size, Real* values) {
  const std::int64_t stride = std::int64_t(gridDim.x) * blockDim.x;
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < taken; i += stride) {
    const std::int64_t at = positions ? positions[i] : i;
    Real value = 0;
    if (at >= 0 && at < size) {
      const int s = first_behind(segments, count, at);
      if (s < count && segments[s].start <= at) {
        value = buffer[at];
        buffer[at] = 0;
      }
    }
    values[i] = value;
  }
}

}  // namespace hvs
