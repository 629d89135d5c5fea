// Histogram of one radix digit of magnitudes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../common/bits.hpp"

namespace hvs {

// The `width` bits from bit `shift` on, of the keys that match `prefix` in all higher bits.
template <class Key> struct Digit {
  Key prefix;
  int shift, width;
};

template <class Real> class Histogram {
 public:
  explicit Histogram(Digit<Key<Real>> digit) : digit_(digit), counts_(std::size_t(lanes) << digit.width) {}

  // Counts n < 2^31 more elements.
  void add(const Real* x, std::size_t n) {
    const Digit<Key<Real>> digit = digit_;
    const Key<Real> mask = (Key<Real>(1) << digit.width) - 1;
    std::uint32_t* const counts = counts_.data();
    for (std::size_t i = 0; i < n; ++i) {
      const Key<Real> key = magnitude(x[i]);
      const bool agrees = (key ^ digit.prefix) >> digit.shift <= mask;
      counts[std::size_t(key >> digit.shift & mask) * lanes + i % lanes] += agrees;
    }
  }

  // The number of elements for each value of the digit.
  std::vector<std::int64_t> totals() const {
    std::vector<std::int64_t> totals(counts_.size() / lanes);
    for (std::size_t i = 0; i < counts_.size(); ++i) totals[i / lanes] += counts_[i];
    return totals;
  }

 private:
  static constexpr std::size_t lanes = 8;  // interleaved histograms: adjacent equal keys do not wait for each other

  Digit<Key<Real>> digit_;
  std::vector<std::uint32_t> counts_;
};

}  // namespace hvs
