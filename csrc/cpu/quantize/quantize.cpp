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

// Converts the elements of a block to codes, one per byte.
template <class Real>
HVS_INLINE void round_block(const Real* __restrict x, std::size_t n, Real unit, int level, const Real* __restrict drawn,
                            std::uint8_t* __restrict codes) {
  for (std::size_t i = 0; i < n; ++i) codes[i] = code_of(x[i], unit, level, drawn[i]);
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
  static constexpr int level = largest_level(bits);

  template <class Real>
  static HVS_INLINE float run_block(const Real* x, std::size_t n, std::uint64_t key, std::size_t block,
                                    std::uint8_t* codes) {
    alignas(64) Real drawn[quantized_block];
    alignas(64) std::uint8_t wide[quantized_block + 1];
    std::uint8_t* const levels = bits == 8 ? codes : wide;
    const float unit = unit_of(double(largest_magnitude(x, n)), level);
    if (unit > 0) {
      draw(key, block, drawn);
      round_block(x, n, Real(unit), level, drawn, levels);
    } else {
      std::memset(levels, level, n);
    }
    if (bits == 4) {
      wide[n] = level;  // the upper half of the last byte, if n is odd
      pack(wide, (n + 1) / 2, codes);
    }
    return unit;
  }

  template <class Real>
  static HVS_INLINE void run(const Real* x, std::size_t size, std::uint64_t key, std::uint8_t* codes, float* units) {
    const std::size_t full = size / quantized_block;
    for (std::size_t b = 0; b < full; ++b) {
      units[b] = run_block(x + b * quantized_block, quantized_block, key, b, codes + b * (quantized_block * bits / 8));
    }
    const std::size_t rest = size % quantized_block, at = size - rest;
    if (rest) units[full] = run_block(x + at, rest, key, full, codes + at * bits / 8);
  }
};

template <int bits, bool add> struct Dequantize {
  template <class Real>
  static HVS_INLINE void run_block(const std::uint8_t* codes, float unit, std::size_t n, Real scale, Real* out) {
    alignas(64) std::uint8_t wide[quantized_block];
    if (bits == 4) unpack(codes, (n + 1) / 2, wide);
    const std::uint8_t* const levels = bits == 8 ? codes : wide;
    const Real factor = scale * Real(unit);
    Real* __restrict to = out;
    for (std::size_t i = 0; i < n; ++i) {
      const Real x = number_of(levels[i], largest_level(bits), factor);
      to[i] = add ? to[i] + x : x;
    }
  }

  template <class Real>
  static HVS_INLINE void run(const std::uint8_t* codes, const float* units, std::size_t size, Real scale, Real* out) {
    const std::size_t full = size / quantized_block;
    for (std::size_t b = 0; b < full; ++b) {
      run_block(codes + b * (quantized_block * bits / 8), units[b], quantized_block, scale, out + b * quantized_block);
    }
    const std::size_t rest = size % quantized_block, at = size - rest;
    if (rest) run_block(codes + at * bits / 8, units[full], rest, scale, out + at);
  }
};

}  // namespace

template <class Real>
void quantize(const Real* buffer, std::size_t size, int bits, std::uint64_t seed, std::uint8_t* codes, float* units) {
  if (bits == 8) {
    run_at_level<Quantize<8>>(buffer, size, mix(seed), codes, units);
  } else {
    run_at_level<Quantize<4>>(buffer, size, mix(seed), codes, units);
  }
}

template <class Real>
void dequantize(const std::uint8_t* codes, const float* units, std::size_t size, int bits, Real scale, bool add,
                Real* buffer) {
  if (bits == 8) {
    add ? run_at_level<Dequantize<8, true>>(codes, units, size, scale, buffer)
        : run_at_level<Dequantize<8, false>>(codes, units, size, scale, buffer);
  } else {
    add ? run_at_level<Dequantize<4, true>>(codes, units, size, scale, buffer)
        : run_at_level<Dequantize<4, false>>(codes, units, size, scale, buffer);
  }
}

template void quantize(const float*, std::size_t, int, std::uint64_t, std::uint8_t*, float*);
template void quantize(const double*, std::size_t, int, std::uint64_t, std::uint8_t*, float*);
template void dequantize(const std::uint8_t*, const float*, std::size_t, int, float, bool, float*);
template void dequantize(const std::uint8_t*, const float*, std::size_t, int, double, bool, double*);

}  // namespace hvs
