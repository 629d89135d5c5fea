// Stochastic quantization of a buffer, in the format of ../common/quantize.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/quantize.hpp"

namespace hvs {

inline std::size_t quantized_blocks(std::size_t size) { return (size + quantized_block - 1) / quantized_block; }

// Bytes that the codes take; bits is 4 or 8.
inline std::size_t code_bytes(std::size_t size, int bits) { return bits == 8 ? size : (size + 1) / 2; }

// The random numbers depend on the seed and the position only.
template <class Real>
void quantize(const Real* buffer, std::size_t size, int bits, std::uint64_t seed, std::uint8_t* codes, float* units);

// buffer <- scale * what the codes stand for, plus what it holds if `add`
template <class Real>
void dequantize(const std::uint8_t* codes, const float* units, std::size_t size, int bits, Real scale, bool add,
                Real* buffer);

}  // namespace hvs
