// Codes of indices and values. No index and no code causes an access outside the arrays.
#include "../common/coding.hpp"
#include "scan.cuh"

namespace hvs {

constexpr int batch = 4;  // elements per thread
constexpr int tile = batch * block_threads;

// The number of the thread in the grid.
HVS_FUNCTION std::int64_t thread_number() {
  return std::int64_t(blockIdx.x) * block_threads + std::int64_t(threadIdx.x);
}

// --- indices -------------------------------------------------------------------------------------------------------

// The number of positions between index i and the next.
HVS_FUNCTION std::uint32_t gap(const std::int32_t* indices, std::int64_t i) {
  return std::uint32_t(indices[i + 1]) - std::uint32_t(indices[i]) - 1;
}

// Sets `damaged` unless the indices ascend from 0 to below `end`.
__global__ void __launch_bounds__(block_threads)
    check_ascending(const std::int32_t* indices, std::int64_t count, std::int64_t end, std::uint32_t* damaged) {
  const std::int64_t i = thread_number();
  if (i >= count) return;
  const std::int64_t index = indices[i], before = i > 0 ? indices[i - 1] : -1;
  if (index <= before || index >= end) *damaged = 1;
}

// Copies one in `stride` gaps' first index, then their second ones, then the last index of all.
__global__ void __launch_bounds__(block_threads)
    sample_gaps(const std::int32_t* indices, std::int64_t gaps, std::int64_t stride, std::int64_t samples,
                std::int32_t* sampled) {
  const std::int64_t i = thread_number();
  if (i < samples) {
    sampled[i] = indices[i * stride];
    sampled[samples + i] = indices[i * stride + 1];
  }
  if (i == 0) sampled[2 * samples] = indices[gaps];
}

// Writes the low bits of all gaps; each thread composes one word.
__global__ void __launch_bounds__(block_threads)
    pack_lows(const std::int32_t* indices, std::int64_t gaps, int bits, std::uint32_t* lows, std::int64_t words) {
  const std::int64_t number = thread_number(), begin = 32 * number;
  if (number >= words) return;
  const std::uint32_t mask = (1u << bits) - 1;
  std::uint32_t word = 0;
  for (std::int64_t i = begin / bits; i < gaps && i * bits < begin + 32; ++i) {
    const std::uint32_t low = gap(indices, i) & mask;
    const int shift = int(i * bits - begin);
    word |= shift < 0 ? low >> -shift : low << shift;
  }
  lows[number] = word;
}

// State shared by the kernels and the host; all bytes are zero at the start.
struct State {
  std::int64_t count;  // bits written, or ones read
  std::uint64_t last;  // last index
  std::uint32_t ticket, damaged;
};

// Writes the high parts in unary: sets a one for each gap, in words that are zero at the start.
__global__ void __launch_bounds__(block_threads)
    write_highs(const std::int32_t* indices, std::int64_t gaps, int bits, State* state, Status* statuses,
                std::uint32_t* highs, std::int64_t words) {
  const std::int64_t number = take_ticket(&state->ticket), begin = number * tile;
  const std::int64_t first = begin + std::int64_t(threadIdx.x) * batch;
  std::uint64_t end[batch], sum = 0;
  for (int i = 0; i < batch; ++i) {
    if (first + i < gaps) sum += (gap(indices, first + i) >> bits) + std::uint64_t(1);
    end[i] = sum;
  }
  const Prefix<std::uint64_t> prefix = scan_block(sum);
  const std::uint64_t before = look_back(statuses, number, prefix.total);
  if (begin + tile >= gaps && threadIdx.x == 0) state->count = std::int64_t(before + prefix.total);
  for (int i = 0; i < batch; ++i) {
    const std::uint64_t place = before + prefix.before + end[i] - 1;
    if (first + i < gaps && place < 32 * std::uint64_t(words)) atomicOr(&highs[place / 32], 1u << (place % 32));
  }
}

// Lists the positions of the ones; each thread reads one word.
__global__ void __launch_bounds__(block_threads)
    list_ones(const std::uint32_t* highs, std::int64_t words, std::int64_t gaps, State* state, Status* statuses,
              std::uint32_t* ones) {
  const std::int64_t number = take_ticket(&state->ticket);
  const std::int64_t at = number * block_threads + std::int64_t(threadIdx.x);
  std::uint32_t word = at < words ? highs[at] : 0;
  const Prefix<std::uint32_t> prefix = scan_block(std::uint32_t(__popc(word)));
  const std::uint64_t before = look_back(statuses, number, prefix.total);
  if ((number + 1) * block_threads >= words && threadIdx.x == 0) {
    state->count = std::int64_t(before + prefix.total);
    if ((highs[words - 1] | highs[words - 2]) == 0) state->damaged = 1;  // a last word of 64 bits without a one
  }
  for (std::int64_t i = std::int64_t(before + prefix.before); word != 0 && i < gaps; ++i, word &= word - 1) {
    ones[i] = std::uint32_t(32 * at + __ffs(int(word)) - 1);
  }
}

// The low bits of gap number i; `words` is the length of `lows`.
HVS_FUNCTION std::uint32_t low_bits(const std::uint32_t* lows, std::int64_t words, std::int64_t i, int bits) {
  if (bits == 0) return 0;
  const std::int64_t place = i * bits, word = place / 32;
  const std::uint64_t high = word + 1 < words ? lows[word + 1] : 0;
  return std::uint32_t((lows[word] | high << 32) >> (place % 32)) & ((1u << bits) - 1);
}

// Decodes the indices, of which `start` is the first, with the listed ones of their gaps. state->last becomes the last
// one, unless it is also the first.
__global__ void __launch_bounds__(block_threads)
    read_gaps(const std::uint32_t* lows, std::int64_t words, std::int64_t gaps, int bits, std::uint32_t start,
              const std::uint32_t* ones, State* state, Status* statuses, std::int32_t* indices) {
  const std::int64_t number = take_ticket(&state->ticket), begin = number * tile;
  const std::int64_t first = begin + std::int64_t(threadIdx.x) * batch;
  std::uint32_t end[batch], sum = 0;
  for (int i = 0; i < batch; ++i) {
    if (first + i < gaps) sum += low_bits(lows, words, first + i, bits) + 1;
    end[i] = sum;
  }
  const Prefix<std::uint64_t> prefix = scan_block(std::uint64_t(sum));
  const std::uint64_t before = start + prefix.before + look_back(statuses, number, prefix.total);
  if (first == 0) indices[0] = std::int32_t(start);
  for (int i = 0; i < batch && first + i < gaps; ++i) {
    const std::uint32_t zeros = ones[first + i] - std::uint32_t(first + i);
    indices[first + i + 1] = std::int32_t(std::uint32_t(before) + end[i] + (zeros << bits));
  }
  // The thread of the last gap stores the last index in 64 bits, for the host to check, and checks the bits after the
  // low bits.
  if (first >= gaps || first + batch < gaps) return;
  state->last = before + sum + (std::uint64_t(ones[gaps - 1] - std::uint32_t(gaps - 1)) << bits);
  const std::int64_t used = gaps * bits;
  for (std::int64_t w = used / 32; w < words; ++w) {
    if (lows[w] >> (w == used / 32 ? used % 32 : 0)) state->damaged = 1;
  }
}

// --- values --------------------------------------------------------------------------------------------------------

// Maxima of infinite_key - key and of key over the finite nonzero values; `range` is zero at the start.
template <class Real>
__global__ void __launch_bounds__(block_threads)
    key_range(const Real* values, std::int64_t size, std::int32_t* range) {
  std::int32_t low = 0, high = 0;
  for (std::int64_t i = thread_number(); i < size; i += std::int64_t(gridDim.x) * block_threads) {
    const std::int32_t key = key_of(values[i]);
    if (key == 0 || key >= infinite_key) continue;
    low = max(low, infinite_key - key);
    high = max(high, key);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    low = max(low, __shfl_xor_sync(full_warp, low, distance));
    high = max(high, __shfl_xor_sync(full_warp, high, distance));
  }
  if (threadIdx.x % 32 == 0 && high > 0) {
    atomicMax(&range[0], low);
    atomicMax(&range[1], high);
  }
}

template <class Real>
__global__ void __launch_bounds__(block_threads)
    round_levels(const Real* values, std::int64_t size, int top, int shift, int largest, Real* rounded, Real* rest) {
  const std::int64_t i = thread_number();
  if (i >= size) return;
  const Levels levels = {top, shift, largest};
  const Real x = values[i];
  const Real near = Real(level_value(levels, level_code(levels, key_of(x), x < 0))), left = x - near;
  const bool finite = x - x == 0, exact = x - left == near;
  rounded[i] = !finite ? x : exact ? near : Real(0);
  rest[i] = !finite ? Real(0) : exact ? left : x;
}

// Each thread writes one byte.
template <class Real, int bits>
__global__ void __launch_bounds__(block_threads)
    encode_levels(const Real* values, std::int64_t size, int top, int shift, std::uint8_t* codes) {
  constexpr int each = 8 / bits;
  const std::int64_t number = thread_number();
  const Levels levels = {top, shift, largest_level_of(bits)};
  std::uint32_t byte = 0;
  for (int i = 0; i < each && number * each + i < size; ++i) {
    const Real x = values[number * each + i];
    byte |= std::uint32_t(level_code(levels, key_of(x), x < 0)) << (bits * i);
  }
  if (number * each < size) codes[number] = std::uint8_t(byte);
}

template <class Real, int bits>
__global__ void __launch_bounds__(block_threads)
    decode_levels(const std::uint8_t* codes, std::int64_t size, int top, int shift, Real* values) {
  const std::int64_t i = thread_number();
  if (i >= size) return;
  const Levels levels = {top, shift, largest_level_of(bits)};
  const int code = bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
  values[i] = Real(level_value(levels, code));
}

}  // namespace hvs
