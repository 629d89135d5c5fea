// The order of additions that sums have on every device, so that their bits are the same on all of them.
//
// What is added up is divided into tiles of at most tile_of_sums adjacent elements. Element i of a tile, widened to
// float64, goes to lane i % lanes_of_sums, in the order of i. Then the upper half of the lanes is added to the lower
// one, until one is left; and the sums of the tiles are added in their order.
#pragma once

#include "portable.hpp"

namespace hvs {

constexpr std::size_t lanes_of_sums = 8;
constexpr std::size_t tile_of_sums = 2048;

// Where tiles must be shared out before it is known where they begin: so many positions of a bucket have tiles of their
// own, whose sums are added up first.
constexpr std::size_t block_of_sums = 16 * tile_of_sums;

}  // namespace hvs
