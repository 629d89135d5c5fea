// The order of additions in sums, which gives the same bits on every device.
//
// The elements are divided into tiles of at most tile_of_sums adjacent ones. Element i of a tile, widened to float64,
// is added to lane i % lanes_of_sums, in the order of i. Then the upper half of the lanes is added to the lower half
// until one lane is left. The sums of the tiles are added in their order.
#pragma once

#include "portable.hpp"

namespace hvs {

constexpr std::size_t lanes_of_sums = 8;
constexpr std::size_t tile_of_sums = 2048;

// Positions per block. Where tiles are distributed before their boundaries are known, no tile crosses a block boundary,
// and the sums of each block are added first.
constexpr std::size_t block_of_sums = 16 * tile_of_sums;

}  // namespace hvs
