// Stochastic quantization: a warp processes a block of 256 elements, each thread a quad of the first half and one of
// the second. The two quads use the same random bits, and their codes of 4 bits are in the same bytes.
#include "../common/bits.hpp"
#include "../common/quantize.hpp"
#include "quads.cuh"
#include "scan.cuh"

namespace hvs {

constexpr int half_size = int(half_block);
constexpr int block_size = int(quantized_block);

// The block of a warp. Element i of a thread's quad in half h is at h * half_size + quad_of_warp() + i in the block.
struct Block {
  std::int64_t number, begin;
  int size;
};

HVS_FUNCTION Block block_of_warp(std::int64_t size) {
  const std::int64_t number = std::int64_t(blockIdx.x) * block_warps + threadIdx.x / 32;
  const std::int64_t begin = number * block_size, left = size - begin;
  return {number, begin, left < 0 ? 0 : left < block_size ? int(left) : block_size};
}

HVS_FUNCTION int quad_of_warp() { return int(threadIdx.x % 32) * quad; }

// Loads the thread's elements, and zeros after the end of the block.
template <class Real> HVS_FUNCTION void load_halves(const Real* x, int n, Quad<Real> (&halves)[2]) {
  const bool whole = n == block_size && aligned(x, alignof(Quad<Real>));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = h * half_size + quad_of_warp();
    if (whole) {
      halves[h] = *reinterpret_cast<const Quad<Real>*>(x + first);
      continue;
    }
#pragma unroll
    for (int i = 0; i < quad; ++i) halves[h].x[i] = first + i < n ? x[first + i] : Real(0);
  }
}

template <class Real> HVS_FUNCTION Real largest_magnitude(const Quad<Real> (&halves)[2]) {
  Key<Real> largest = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < quad; ++i) {
      const Key<Real> key = magnitude(halves[h].x[i]);
      largest = key > largest ? key : largest;
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const Key<Real> other = __shfl_xor_sync(full_warp, largest, distance);
    largest = other > largest ? other : largest;
  }
  return bit_cast<Real>(largest);
}

template <int bits> using Codes = Quad<Code<bits>>;

// Writes the codes of a full block to aligned memory; each thread writes those of its elements.
template <int bits> HVS_FUNCTION void store_whole(const Codes<bits> (&halves)[2], Code<bits>* codes) {
  if constexpr (bits == 4) {
    Codes<bits> packed;
    for (int i = 0; i < quad; ++i) packed.x[i] = std::uint8_t(halves[0].x[i] | halves[1].x[i] << 4);
    *reinterpret_cast<Codes<bits>*>(codes + quad_of_warp()) = packed;
  } else {
    for (int h = 0; h < 2; ++h) *reinterpret_cast<Codes<bits>*>(codes + h * half_size + quad_of_warp()) = halves[h];
  }
}

// Writes the codes of any block. In an odd block with 4 bits, the unused half of the last byte is the code of zero.
template <int bits>
HVS_FUNCTION void store_any(const Codes<bits> (&halves)[2], int n, Codes<bits>* wide, Code<bits>* codes) {
  for (int h = 0; h < 2; ++h) wide[(h * half_size + quad_of_warp()) / quad] = halves[h];
  __syncwarp();
  const Code<bits>* const all = wide->x;
  const int count = bits == 4 ? (n + 1) / 2 : n;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    codes[i] = bits == 4 ? Code<bits>(all[i] | all[count + i] << 4) : all[i];
  }
}

// The codes of the block.
template <int bits, class Pointer> HVS_FUNCTION Pointer codes_of(const Block& block, Pointer codes) {
  return codes + (bits == 4 ? block.begin / 2 : block.begin);
}

template <class Real, int bits>
__global__ void __launch_bounds__(block_threads)
    quantize(const Real* buffer, std::int64_t size, std::uint64_t seed, Code<bits>* codes, float* units) {
  __shared__ Codes<bits> wide[block_warps][block_size / quad];
  const Block block = block_of_warp(size);
  if (block.size == 0) return;
  Quad<Real> x[2];
  load_halves(buffer + block.begin, block.size, x);
  const float unit = unit_of<bits>(double(largest_magnitude(x)));
  if (threadIdx.x % 32 == 0) units[block.number] = unit;
  Codes<bits> found[2];
  const std::uint64_t key = mix(seed);
#pragma unroll
  for (int i = 0; i < quad; ++i) {
    found[0].x[i] = found[1].x[i] = largest_level(bits);
    if (!(unit > 0)) continue;
    const std::uint64_t random = pair_bits(key, block.number, quad_of_warp() + i);
    found[0].x[i] = code_of<bits>(x[0].x[i], Real(unit), drawn_from<Real>(std::uint32_t(random)));
    found[1].x[i] = code_of<bits>(x[1].x[i], Real(unit), drawn_from<Real>(std::uint32_t(random >> 32)));
  }
  Code<bits>* const to = codes_of<bits>(block, codes);
  if (block.size == block_size) {
    store_whole<bits>(found, to);
  } else {
    store_any<bits>(found, block.size, wide[threadIdx.x / 32], to);
  }
}

// Loads the codes of the thread's elements from a full block in aligned memory.
template <int bits> HVS_FUNCTION void load_whole(const Code<bits>* codes, Codes<bits> (&halves)[2]) {
  const auto quad_at = [&](int first) { return *reinterpret_cast<const Codes<bits>*>(codes + first + quad_of_warp()); };
  if constexpr (bits == 4) {
    const Codes<bits> packed = quad_at(0);
    for (int i = 0; i < quad; ++i) {
      halves[0].x[i] = packed.x[i] & 15;
      halves[1].x[i] = packed.x[i] >> 4;
    }
  } else {
    for (int h = 0; h < 2; ++h) halves[h] = quad_at(h * half_size);
  }
}

// buffer <- scale * value of each code, plus the old buffer if `add`
template <class Real, int bits>
__global__ void __launch_bounds__(block_threads)
    dequantize(const Code<bits>* codes, const float* units, std::int64_t size, Real scale, int add, Real* buffer) {
  const Block block = block_of_warp(size);
  if (block.size == 0) return;
  const Real factor = scale * Real(units[block.number]);
  const Code<bits>* const from = codes_of<bits>(block, codes);
  Real* const to = buffer + block.begin;
  if (block.size == block_size && aligned(from, alignof(Codes<bits>)) && aligned(to, alignof(Quad<Real>))) {
    Codes<bits> found[2];
    Quad<Real> old[2] = {};
    load_whole<bits>(from, found);
    if (add) load_halves(to, block_size, old);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < quad; ++i) {
        const Real x = number_of<bits>(found[h].x[i], factor);
        old[h].x[i] = add ? old[h].x[i] + x : x;
      }
      *reinterpret_cast<Quad<Real>*>(to + h * half_size + quad_of_warp()) = old[h];
    }
    return;
  }
  const int bytes = (block.size + 1) / 2;  // with 4 bits
  for (int i = threadIdx.x % 32; i < block.size; i += 32) {
    const int code = bits != 4 ? from[i] : i < bytes ? from[i] & 15 : from[i - bytes] >> 4;
    const Real x = number_of<bits>(Code<bits>(code), factor);
    to[i] = add ? to[i] + x : x;
  }
}

}  // namespace hvs
