#include "select/sample.hpp"

#include <algorithm>
#include <cmath>

#include "select/rank.hpp"

namespace hvs {
namespace {

// A 32-bit hash (the finaliser of MurmurHash3), so that the sample does not alias with periodic gradients.
std::uint32_t hash(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// Four standard deviations of a count with about a Poisson distribution, plus a margin for very small counts.
double deviation(double count) { return 4 * std::sqrt(count) + 8; }

// The same for a count of elements that come in groups of `together`.
double deviation(double count, double together) { return together * deviation(count / together); }

template <class Real>
void load_keys(const Step<Real>& step, const Tensor& gradient, std::size_t first, std::size_t n, Key<Real>* keys) {
  Real added[cluster] = {};
  load(gradient, first, n, added);
  if (const Velocity<Real>& velocity = step.velocity; velocity.values) {
    const Real* const u = velocity.values + gradient.start + first;
    for (std::size_t i = 0; i < n; ++i) added[i] = velocity.added(velocity.updated(u[i], added[i]), added[i]);
  }
  const Real* const old = step.source + gradient.start + first;
  for (std::size_t i = 0; i < n; ++i) keys[i] = magnitude(accumulated(old[i], added[i], step.scale));
}

constexpr std::size_t lookahead = 16;  // clusters whose cache misses overlap

template <class Real> void prefetch(const Step<Real>& step, const Tensor& gradient, std::size_t i) {
  if (i >= gradient.length) return;
  __builtin_prefetch(gradient.data + std::ptrdiff_t(i) * gradient.stride);
  __builtin_prefetch(step.source + gradient.start + i);
  if (step.velocity.values) __builtin_prefetch(step.velocity.values + gradient.start + i);
}

template <class Real> void draw(const Step<Real>& step, std::size_t active, Key<Real>* keys) {
  auto gradient = step.gradients.begin();
  std::size_t before = 0;  // active positions before this gradient
  for (std::size_t j = 0; j < cluster_count(active); ++j) {
    const std::size_t begin = cluster_begin(j, active), end = begin + cluster;
    while (before + gradient->length <= begin) before += gradient++->length;
    prefetch(step, *gradient, cluster_begin(j + lookahead, active) - before);
    auto from = gradient;
    for (std::size_t at = begin, start = before; at < end; start += from++->length) {
      const std::size_t n = std::min(end, start + from->length) - at;
      load_keys(step, *from, at - start, n, keys);
      keys += n;
      at += n;
    }
  }
}

// The mean number of keys that reach `low` in the cluster of a key that does: 1 .. cluster.
template <class Key> double measure_together(const Key* keys, std::size_t count, Key low) {
  std::size_t sum = 0, squares = 0;
  for (std::size_t i = 0; i < count; i += cluster) {
    std::uint32_t here = 0;
    for (std::size_t j = 0; j < cluster; ++j) here += keys[i + j] >= low;
    sum += here;
    squares += here * here;
  }
  return double(squares) / double(sum);
}

std::size_t as_rank(double rank, std::size_t count) { return std::size_t(std::clamp(rank + 0.5, 1.0, double(count))); }

}  // namespace

std::size_t cluster_count(std::size_t active) {
  return std::clamp<std::size_t>(active / 2048, smallest_sampled / cluster, 2048);
}

std::size_t cluster_begin(std::size_t j, std::size_t active) {
  const std::uint64_t width = (std::uint64_t(active) << 32) / cluster_count(active);  // with 32 fractional bits
  const std::size_t position = (j * width + (width >> 16) * (hash(std::uint32_t(j)) >> 16)) >> 32;
  return std::min(position / cluster * cluster, active - cluster);
}

template <class Real> Estimate<Real> estimate(const Step<Real>& step, std::size_t k, Workspace& scratch) {
  const std::size_t active = step.active(), count = cluster_count(active) * cluster;
  Key<Real>* const keys = scratch.get<Key<Real>>(0, 2 * count);
  draw(step, active, keys);
  // Only the keys down to the lowest rank that is needed below are ranked.
  const double rank = double(k) * double(count) / double(active);
  const std::size_t lowest = as_rank(rank + deviation(rank, cluster), count);
  Key<Real>* const largest = keys + count;
  const Key<Real> floor = find_bin(keys, count, lowest, Key<Real>(0), largest_key<Real>).floor;
  const std::size_t kept = keep_from(keys, count, floor, largest);
  const auto at = [&](double r) { return nth_largest(largest, kept, as_rank(r, kept)); };
  const double together = measure_together(keys, count, at(rank + deviation(rank)));
  const double spread = deviation(rank, together), most = rank + spread;
  const Key<Real> high = rank > spread ? at(rank - spread) : largest_key<Real>;
  const double scale = double(active) / double(count);
  return {{at(most), at(rank), high}, std::size_t((most + deviation(most, together)) * scale)};
}

template Estimate<float> estimate(const Step<float>&, std::size_t, Workspace&);
template Estimate<double> estimate(const Step<double>&, std::size_t, Workspace&);

}  // namespace hvs
