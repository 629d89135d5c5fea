#include "sample.hpp"

#include <algorithm>
#include <cmath>

#include "rank.hpp"

namespace hvs {
namespace {

// A 32-bit hash (the finaliser of MurmurHash3), so that the sample does not resonate with periodic gradients.
std::uint32_t hash(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// Four standard deviations of a count that is about Poisson distributed, and room for very small counts.
double deviation(double count) { return 4 * std::sqrt(count) + 8; }

double rank_in_sample(std::size_t k, std::size_t active) {
  return double(k) * double(sample_size(active)) / double(active);
}

template <class Real> void draw(const Step<Real>& step, std::size_t count, std::size_t active, Key<Real>* keys) {
  std::size_t j = 0, before = 0;
  for (const Tensor& gradient : step.gradients) {
    const std::size_t stop = before + gradient.length;
    for (std::size_t p; j < count && (p = sample_position(j, count, active)) < stop; ++j) {
      Real added = 0;
      load(gradient, p - before, 1, &added);
      const Real old = step.buffer[gradient.start + p - before];
      keys[j] = magnitude((step.scale == 0 ? Real(0) : step.scale * old) + added);
    }
    before = stop;
  }
}

}  // namespace

std::size_t sample_size(std::size_t active) {
  return std::min(active, std::clamp<std::size_t>(active / 64, 1024, 65536));
}

std::size_t sample_position(std::size_t j, std::size_t count, std::size_t active) {
  const std::uint64_t width = (std::uint64_t(active) << 32) / count;  // of a stratum, with 32 fractional bits
  return std::size_t((j * width + (width >> 16) * (hash(std::uint32_t(j)) >> 16)) >> 32);
}

std::size_t expected_candidates(std::size_t k, std::size_t active) {
  const double rank = rank_in_sample(k, active) + deviation(rank_in_sample(k, active));
  return std::size_t((rank + deviation(rank)) * double(active) / double(sample_size(active)));
}

template <class Real> Bracket<Key<Real>> estimate(const Step<Real>& step, std::size_t k, Key<Real>* scratch) {
  const std::size_t active = step.active(), count = sample_size(active);
  draw(step, count, active, scratch);
  const double rank = rank_in_sample(k, active), spread = deviation(rank);
  const auto nearest = [](double r, std::size_t most) { return std::size_t(std::clamp(r, 1.0, double(most))); };
  const std::size_t lowest = nearest(rank + spread, count);
  const Key<Real> top = *std::max_element(scratch, scratch + count);
  const Key<Real> floor = find_bin(scratch, count, lowest, Key<Real>(0), top).floor;
  const std::size_t kept = keep_from(scratch, count, floor);
  const Key<Real> low = nth_largest(scratch, kept, lowest);
  const Key<Real> guess = nth_largest(scratch, lowest, nearest(rank + 0.5, lowest));
  const Key<Real> high = rank > spread ? nth_largest(scratch, lowest, nearest(rank - spread, lowest)) : largest_key<Real>;
  return {low, guess, high};
}

template Bracket<Key<float>> estimate(const Step<float>&, std::size_t, Key<float>*);
template Bracket<Key<double>> estimate(const Step<double>&, std::size_t, Key<double>*);

}  // namespace hvs
