#include "select/exact.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "histogram.hpp"
#include "select/rank.hpp"

namespace hvs {
namespace {

constexpr int digit_width = 11;        // bits of the key that one pass resolves
constexpr std::size_t block = 16;      // elements that are tested together for entries to take
constexpr std::int64_t few = 1 << 14;  // up to this number, keys are ranked in memory instead of by another pass

template <class Real> std::vector<std::int64_t> count_digit(const Step<Real>& step, Digit<Key<Real>> digit) {
  Histogram<Real> histogram(digit);
  for (const Tensor& gradient : step.gradients) histogram.add(step.buffer + gradient.start, gradient.length);
  return histogram.totals();
}

template <class Real> std::vector<Key<Real>> keys_between(const Step<Real>& step, Key<Real> low, Key<Real> high) {
  std::vector<Key<Real>> keys;
  for (const Tensor& gradient : step.gradients) {
    for (std::size_t i = gradient.start; i < gradient.stop(); ++i) {
      const Key<Real> key = magnitude(step.buffer[i]);
      if (key >= low && key <= high) keys.push_back(key);
    }
  }
  return keys;
}

// The numbers of elements above the key and equal to it. Counts have the width of the key: n < 2^31.
template <class Real> std::pair<std::size_t, std::size_t> count_from(const Real* x, std::size_t n, Key<Real> key) {
  Key<Real> above = 0, equal = 0;
  for (std::size_t i = 0; i < n; ++i) {
    above += magnitude(x[i]) > key;
    equal += magnitude(x[i]) == key;
  }
  return {std::size_t(above), std::size_t(equal)};
}

// Cuts at `guess` and returns true if the k-th largest key equals it. It usually does if many keys are equal, zeros
// above all, and radix selection would have to resolve every digit.
template <class Real> bool try_cut(const Step<Real>& step, std::size_t k, Key<Real> guess, Cut<Key<Real>>& cut) {
  std::size_t above = 0, equal = 0;
  for (const Tensor& gradient : step.gradients) {
    const auto counts = count_from(step.buffer + gradient.start, gradient.length, guess);
    above += counts.first;
    equal += counts.second;
  }
  if (above >= k || above + equal < k) return false;
  cut = {guess, k - above};
  return true;
}

// Narrows the k-th largest key digit by digit, until few keys remain.
template <class Real> Cut<Key<Real>> find_cut(const Step<Real>& step, std::size_t k) {
  Key<Real> prefix = 0;
  for (int shift = Bits<Real>::width; shift > 0;) {
    const int width = std::min(digit_width, shift);
    shift -= width;
    const std::vector<std::int64_t> counts = count_digit<Real>(step, {prefix, shift, width});
    std::size_t bin = counts.size() - 1;
    for (; std::size_t(counts[bin]) < k; --bin) k -= std::size_t(counts[bin]);
    prefix |= Key<Real>(bin) << shift;
    if (counts[bin] <= few && shift > 0) {
      const Key<Real> last = prefix | ((Key<Real>(1) << shift) - 1);
      std::vector<Key<Real>> keys = keys_between(step, prefix, last);
      return cut_at(keys.data(), keys.size(), k, prefix, last);
    }
  }
  return {prefix, k};
}

// Moves the elements that the cut takes from n elements; returns their number.
template <class Real>
std::size_t take(Real* x, std::size_t n, std::int32_t first, Cut<Key<Real>>& cut, std::int32_t* indices, Real* values) {
  bool any = false;
  for (std::size_t i = 0; i < n; ++i) any |= magnitude(x[i]) >= cut.threshold;
  std::size_t taken = 0;
  for (std::size_t i = 0; any && i < n; ++i) {
    const Key<Real> key = magnitude(x[i]);
    const bool tie = key == cut.threshold && cut.ties > 0;
    if (key <= cut.threshold && !tie) continue;
    cut.ties -= tie;
    indices[taken] = first + std::int32_t(i);
    values[taken++] = x[i];
    x[i] = 0;
  }
  return taken;
}

}  // namespace

template <class Real>
void exact_select(const Step<Real>& step, std::size_t k, Key<Real> guess, std::int32_t* indices, Real* values) {
  Cut<Key<Real>> cut;
  if (!try_cut(step, k, guess, cut)) cut = find_cut(step, k);
  std::size_t taken = 0;
  for (const Tensor& gradient : step.gradients) {
    for (std::size_t i = gradient.start; i < gradient.stop() && taken < k; i += block) {
      const std::size_t n = std::min(block, gradient.stop() - i);
      taken += take(step.buffer + i, n, std::int32_t(i), cut, indices + taken, values + taken);
    }
  }
}

template void exact_select(const Step<float>&, std::size_t, Key<float>, std::int32_t*, float*);
template void exact_select(const Step<double>&, std::size_t, Key<double>, std::int32_t*, double*);

}  // namespace hvs
