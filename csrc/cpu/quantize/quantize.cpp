#include "quantize/quantize.hpp"

#include <algorithm>
#include <cstring>

#include "../common/bits.hpp"
#include "simd/dispatch.hpp"

namespace hvs {
namespace {

// Compares keys instead of numbers, so that NaN is the largest.
template <class Real> HVS_INLINE Real largest_magnitude(const Real* x, std::size_t n) {
  Key<Real> largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(x[i]));
  return bit_cast<Real>(largest);
}

// Draws a number for each position of a block.
template <class Real> HVS_INLINE void draw(std::uint64_t key, std::size_t block, Real* out) {
  for (std::size_t i = 0; i < half_block; ++i) {
    const std::uint64_t random = pair_bits(key, block, i);
    out[i] = drawn_from<Real>(std::uint32_t(random));
    out[half_block + i] = drawn_from<Real>(std::uint32_t(random >> 32));
  }
}

// Converts the elements of a block to codes, not packed.
template <int bits, class Real>
HVS_INLINE void round_block(const Real* __restrict x, std::size_t n, Real unit, const Real* __restrict drawn,
                            Code<bits>* __restrict codes) {
  for (std::size_t i = 0; i < n; ++i) codes[i] = code_of<bits>(x[i], unit, drawn[i]);
}

// Packs two codes per byte, one of the first half of the block and one of the second.
HVS_INLINE void pack(const std::uint8_t* __restrict wide, std::size_t bytes, std::uint8_t* __restrict codes) {
  for (std::size_t i = 0; i < bytes; ++i) codes[i] = std::uint8_t(wide[i] | wide[bytes + i] << 4);
}

HVS_INLINE void unpack(const std::uint8_t* __restrict codes, std::size_t bytes, std::uint8_t* __restrict wide) {
  for (std::size_t i = 0; i < bytes; ++i) {
    wide[i] = codes[i] & 15;
    wide[bytes + i] = codes[i] >> 4;
  }
}

template <int bits> struct Quantize {
  static constexpr Code<bits> zero = largest_level(bits);

  template <class Real>
  static HVS_INLINE float run_block(const Real* x, std::size_t n, std::uint64_t key, std::size_t block,
                                    Code<bits>* codes) {
    alignas(64) Real drawn[quantized_block];
    alignas(64) Code<bits> wide[quantized_block + 1];
    Code<bits>* const levels = bits == 4 ? wide : codes;
    const float unit = unit_of<bits>(double(largest_magnitude(x, n)));
    if (unit > 0) {
      draw(key, block, drawn);
      round_block<bits>(x, n, Real(unit), drawn, levels);
    } else {
      std::fill_n(levels, n, zero);
    }
    if constexpr (bits == 4) {
      wide[n] = zero;  // the upper half of the last byte, if n is odd
      pack(wide, (n + 1) / 2, codes);
    }
    return unit;
  }

  template <class Real>
  static HVS_INLINE void run(const Real* x, std::size_t size, std::uint64_t key, Code<bits>* codes, float* units) {
    const std::size_t full = size / quantized_block, block_codes = code_count(quantized_block, bits);
    for (std::size_t b = 0; b < full; ++b) {
      units[b] = run_block(x + b * quantized_block, quantized_block, key, b, codes + b * block_codes);
    }
    const std::size_t rest = size % quantized_block;
    if (rest) units[full] = run_block(x + size - rest, rest, key, full, codes + full * block_codes);
  }
};

template <int bits, bool add> struct Dequantize {
  template <class Real>
  static HVS_INLINE void run_block(const Code<bits>* codes, float unit, std::size_t n, Real scale, Real* out) {
    alignas(64) Code<bits> wide[quantized_block];
    if constexpr (bits == 4) unpack(codes, (n + 1) / 2, wide);
    const Code<bits>* const levels = bits == 4 ? wide : codes;
    const Real factor = scale * Real(unit);
    Real* __restrict to = out;
    for (std::size_t i = 0; i < n; ++i) {
      const Real x = number_of<bits>(levels[i], factor);
      to[i] = add ? to[i] + x : x;
    }
  }

  template <class Real>
  static HVS_INLINE void run(const Code<bits>* codes, const float* units, std::size_t size, Real scale, Real* out) {
    const std::size_t full = size / quantized_block, block_codes = code_count(quantized_block, bits);
    for (std::size_t b = 0; b < full; ++b) {
      run_block(codes + b * block_codes, units[b], quantized_block, scale, out + b * quantized_block);
    }
    const std::size_t rest = size % quantized_block;
    if (rest) run_block(codes + full * block_codes, units[full], rest, scale, out + size - rest);
  }
};

}  // namespace

template <int bits, class Real>
void quantize(const Real* buffer, std::size_t size, std::uint64_t seed, Code<bits>* codes, float* units) {
  run_at_level<Quantize<bits>>(buffer, size, mix(seed), codes, units);
}

template <int bits, class Real>
void dequantize(const Code<bits>* codes, const float* units, std::size_t size, Real scale, bool add, Real* buffer) {
  add ? run_at_level<Dequantize<bits, true>>(codes, units, size, scale, buffer)
      : run_at_level<Dequantize<bits, false>>(codes, units, size, scale, buffer);
}

#define HVS_INSTANCES(bits, Real)                                                                   \
  template void quantize<bits>(const Real*, std::size_t, std::uint64_t, Code<bits>*, float*);       \
  template void dequantize<bits>(const Code<bits>*, const float*, std::size_t, Real, bool, Real*);
HVS_INSTANCES(4, float)
HVS_INSTANCES(4, double)
HVS_INSTANCES(8, float)
HVS_INSTANCES(8, double)
HVS_INSTANCES(16, float)
HVS_INSTANCES(16, double)
#undef HVS_INSTANCES

}  // namespace hvs
