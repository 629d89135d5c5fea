// Stochastic quantization of a buffer, in the format of ../common/quantize.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/quantize.hpp"

namespace hvs {

inline std::size_t quantized_blocks(std::size_t size) { return (size + quantized_block - 1) / quantized_block; }

// The number of elements of the codes; bits is 4, 8 or 16.
inline std::size_t code_count(std::size_t size, int bits) { return bits == 4 ? (size + 1) / 2 : size; }

// Encodes a buffer. The random numbers depend only on the seed and the position.
template <int bits, class Real>
void quantize(const Real* buffer, std::size_t size, std::uint64_t seed, Code<bits>* codes, float* units);

// buffer <- scale * value of each code, plus the old buffer if `add`
template <int bits, class Real>
void dequantize(const Code<bits>* codes, const float* units, std::size_t size, Real scale, bool add, Real* buffer);

}  // namespace hvs
