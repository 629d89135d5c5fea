// Stochastic quantization of a buffer, in the format of ../common/quantize.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/quantize.hpp"

namespace hvs {

inline std::size_t quantized_blocks(std::size_t size) { return (size + quantized_block - 1) / quantized_block; }

// The number of bytes of the codes; bits is 4 or 8.
inline std::size_t code_bytes(std::size_t size, int bits) { return bits == 8 ? size : (size + 1) / 2; }

// Encodes a buffer. The random numbers depend only on the seed and the position.
template <class Real>
void quantize(const Real* buffer, std::size_t size, int bits, std::uint64_t seed, std::uint8_t* codes, float* units);

// buffer <- scale * value of each code, plus the old buffer if `add`
template <class Real>
void dequantize(const std::uint8_t* codes, const float* units, std::size_t size, int bits, Real scale, bool add,
                Real* buffer);

}  // namespace hvs
