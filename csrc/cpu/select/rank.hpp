// Order statistics of keys, in linear time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace hvs {

// The k largest keys: all above the threshold, and the first `ties` of those that equal it.
template <class Key> struct Cut {
  Key threshold;
  std::size_t ties;
};

template <class Key> struct Bin {
  Key floor;          // the smallest key of the bin
  Key width;          // its keys are floor .. floor + (width - 1)
  std::size_t above;  // the number of keys above the bin
};

// The bin with the rank-th largest (from 1) of count keys; low .. high is divided into about 2048 equal bins.
template <class Key> Bin<Key> find_bin(const Key* keys, std::size_t count, std::size_t rank, Key low, Key high) {
  constexpr int bins = 2048;
  int shift = 0;
  while ((high - low) >> shift >= bins) ++shift;
  std::array<std::uint32_t, 4 * bins> histogram{};  // four of them, interleaved: adjacent equal keys do not wait
  for (std::size_t i = 0; i < count; ++i) ++histogram[std::size_t((keys[i] - low) >> shift) * 4 + i % 4];
  std::size_t above = 0;
  for (int bin = bins - 1;; --bin) {
    const std::uint32_t* const h = &histogram[std::size_t(bin) * 4];
    const std::size_t here = std::size_t(h[0]) + h[1] + h[2] + h[3];
    if (above + here >= rank || bin == 0) return {low + (Key(bin) << shift), Key(1) << shift, above};
    above += here;
  }
}

// Writes the keys that are at least `floor` to `out`, which holds up to count keys and may be `keys`. Returns their
// number. Does not branch on the keys.
template <class Key> std::size_t keep_from(const Key* keys, std::size_t count, Key floor, Key* out) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Key key = keys[i];
    out[kept] = key;
    kept += key >= floor;
  }
  return kept;
}

// The rank-th largest (from 1) of count keys; reorders them.
template <class Key> Key nth_largest(Key* keys, std::size_t count, std::size_t rank) {
  std::nth_element(keys, keys + rank - 1, keys + count, std::greater<Key>());
  return keys[rank - 1];
}

// The cut that keeps the `rank` largest (from 1) of count keys, all of them in low .. high; reorders the keys.
template <class Key> Cut<Key> cut_at(Key* keys, std::size_t count, std::size_t rank, Key low, Key high) {
  const Bin<Key> bin = find_bin(keys, count, rank, low, high);
  std::size_t kept = keep_from(keys, count, bin.floor, keys);
  kept = std::size_t(std::partition(keys, keys + kept, [&](Key key) { return key - bin.floor < bin.width; }) - keys);
  const Key threshold = nth_largest(keys, kept, rank - bin.above);
  const auto larger = std::size_t(std::count_if(keys, keys + kept, [&](Key key) { return key > threshold; }));
  return {threshold, rank - bin.above - larger};
}

}  // namespace hvs
