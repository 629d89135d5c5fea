#include "statistics/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.hpp"
#include "tiles.hpp"

namespace hvs {
namespace {

constexpr std::size_t block = block_of_sums;  // positions of a block; blocks are distributed over the threads

void add(Sums& total, const Sums& more) {
  total.sum += more.sum;
  total.squares += more.squares;
  total.magnitudes += more.magnitudes;
  total.largest = std::max(total.largest, more.largest);
}

template <class Real> Sums measure(const Step<Real>& step, std::size_t begin, std::size_t end) {
  Sums total = {};
  for_each_tile(step, begin, end, [&](const Tile<Real>& tile) {
    add(total, loops<Real>().measure(tile.gradient, tile.buffer, tile.count, step.scale));
  });
  return total;
}

// Pads the thresholds to full groups; the counts of the padding are not used.
template <class Real> std::vector<Real> in_groups(std::vector<Real> low) {
  low.resize((low.size() + thresholds_at_once - 1) / thresholds_at_once * thresholds_at_once);
  return low;
}

// Counts in the positions begin .. end, in tiles that stay in the L1 cache for all groups of thresholds.
template <class Real>
void count_part(const Real* buffer, const std::vector<Tensor>& tensors, std::size_t begin, std::size_t end,
                const std::vector<Real>& low, std::vector<std::int64_t>& counts) {
  for (const Tensor& tensor : tensors) {
    const std::size_t stop = std::min(tensor.stop(), end);
    for (std::size_t at = std::max(tensor.start, begin); at < stop; at += tile_size) {
      const std::size_t n = std::min(tile_size, stop - at);
      for (std::size_t i = 0; i < low.size(); i += thresholds_at_once) {
        loops<Real>().count(buffer + at, n, &low[i], &counts[i]);
      }
    }
  }
}

void add(Tail& total, const Tail& more) {
  total.count += more.count;
  total.magnitudes += more.magnitudes;
}

// The tail of the positions begin .. end, one block of sums.
template <class Real>
Tail tail_of_block(const Real* buffer, const std::vector<Tensor>& tensors, std::size_t begin, std::size_t end,
                   Real low) {
  Tail total = {};
  for (const Tensor& tensor : tensors) {
    const std::size_t stop = std::min(tensor.stop(), end);
    for (std::size_t at = std::max(tensor.start, begin); at < stop; at += tile_size) {
      add(total, loops<Real>().tail(buffer + at, std::min(tile_size, stop - at), low));
    }
  }
  return total;
}

template <class Real> double square_tensor(const Tensor& t) {
  alignas(64) Real converted[tile_size];
  const Real* const elements = in_place<Real>(t);
  double total = 0;
  for (std::size_t i = 0; i < t.length; i += tile_size) {
    const std::size_t n = std::min(tile_size, t.length - i);
    if (!elements) load_tile(t, i, n, converted);
    total += loops<Real>().square(elements ? elements + i : converted, n);
  }
  return total;
}

// The sum of squares over the positions begin .. end, at most a tile, that the tensors from `first` on cover.
template <class Real>
double score_tile(const Real* buffer, const std::vector<Tensor>& tensors, std::size_t first, std::size_t begin,
                  std::size_t end) {
  if (first < tensors.size() && tensors[first].start <= begin && end <= tensors[first].stop()) {
    return loops<Real>().square(buffer + begin, end - begin);
  }
  alignas(64) Real covered[tile_size] = {};  // zeros change no sum
  for (std::size_t t = first; t < tensors.size() && tensors[t].start < end; ++t) {
    const std::size_t from = std::max(tensors[t].start, begin), to = std::max(from, std::min(tensors[t].stop(), end));
    std::copy(buffer + from, buffer + to, covered + (from - begin));
  }
  return loops<Real>().square(covered, end - begin);
}

constexpr std::size_t lookahead = 32;  // elements whose cache misses overlap

// Finds active positions by number; the numbers must ascend.
template <class Real> class Finder {
 public:
  explicit Finder(const Step<Real>& step) : step_(step), gradient_(step.gradients.begin()) {}

  void prefetch(std::size_t number) {
    const std::size_t i = find(number);
    __builtin_prefetch(gradient_->data + std::ptrdiff_t(i) * gradient_->stride);
    __builtin_prefetch(step_.buffer + gradient_->start + i);
  }

  // Returns acc at the position, as accumulate would store it.
  Real acc(std::size_t number) {
    const std::size_t i = find(number);
    Real added = 0;
    load(*gradient_, i, 1, &added);
    return accumulated(step_.buffer[gradient_->start + i], added, step_.scale);
  }

 private:
  // Advances to the gradient that contains active position `number`; returns the offset in the gradient.
  std::size_t find(std::size_t number) {
    while (before_ + gradient_->length <= number) before_ += gradient_++->length;
    return number - before_;
  }

  const Step<Real>& step_;
  std::vector<Tensor>::const_iterator gradient_;
  std::size_t before_ = 0;  // active positions before this gradient
};

}  // namespace

template <class Real> Sums accumulate_moments(const Step<Real>& step, std::size_t threads) {
  const std::size_t blocks = (step.size + block - 1) / block;
  std::vector<Sums> sums(blocks);
  parallel(threads, [&](std::size_t part) {
    for (std::size_t i = blocks * part / threads; i < blocks * (part + 1) / threads; ++i) {
      sums[i] = measure(step, i * block, std::min((i + 1) * block, step.size));
    }
  });
  Sums total = {};
  for (const Sums& more : sums) add(total, more);
  // Magnitudes are nonnegative, so their sum is NaN only if one of them is. A maximum ignores NaN.
  if (std::isnan(total.magnitudes)) total.largest = std::numeric_limits<double>::quiet_NaN();
  return total;
}

template <class Real>
std::vector<std::int64_t> count_reaching(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors,
                                         const std::vector<Real>& low, std::size_t threads) {
  const std::vector<Real> groups = in_groups(low);
  std::vector<std::vector<std::int64_t>> counts(threads, std::vector<std::int64_t>(groups.size()));
  parallel(threads, [&](std::size_t part) {
    const std::size_t begin = part_begin(size, part, threads), end = part_begin(size, part + 1, threads);
    count_part(buffer, tensors, begin, end, groups, counts[part]);
  });
  std::vector<std::int64_t> total(low.size());
  for (const std::vector<std::int64_t>& more : counts) {
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += more[i];
  }
  return total;
}

template <class Real>
Tail tail(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors, Real low, std::size_t threads) {
  const std::size_t blocks = (size + block - 1) / block;
  std::vector<Tail> tails(blocks);
  parallel(threads, [&](std::size_t part) {
    for (std::size_t i = blocks * part / threads; i < blocks * (part + 1) / threads; ++i) {
      tails[i] = tail_of_block(buffer, tensors, i * block, std::min((i + 1) * block, size), low);
    }
  });
  Tail total = {};
  for (const Tail& more : tails) add(total, more);
  return total;
}

double square_norm(const std::vector<Tensor>& tensors) {
  double total = 0;
  for (const Tensor& t : tensors) {
    total += t.format == Format::float64 ? square_tensor<double>(t) : square_tensor<float>(t);
  }
  return total;
}

template <class Real>
void block_scores(const Real* buffer, std::size_t size, const std::vector<Tensor>& tensors, std::size_t block_size,
                  std::size_t threads, double* scores) {
  const std::size_t blocks = (size + block_size - 1) / block_size;
  parallel(threads, [&](std::size_t part) {
    std::size_t first = 0;  // the first tensor that ends after the position
    for (std::size_t b = blocks * part / threads; b < blocks * (part + 1) / threads; ++b) {
      const std::size_t end = std::min((b + 1) * block_size, size);
      scores[b] = 0;
      for (std::size_t at = b * block_size; at < end; at += tile_size) {
        while (first < tensors.size() && tensors[first].stop() <= at) ++first;
        scores[b] += score_tile(buffer, tensors, first, at, std::min(at + tile_size, end));
      }
    }
  });
}

template <class Real> void sample(const Step<Real>& step, std::size_t start, std::size_t stride, Real* values) {
  const std::size_t count = sample_count(step.active(), start, stride);
  Finder<Real> here(step), ahead(step);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + lookahead < count) ahead.prefetch(start + (i + lookahead) * stride);
    values[i] = here.acc(start + i * stride);
  }
}

template Sums accumulate_moments(const Step<float>&, std::size_t);
template Sums accumulate_moments(const Step<double>&, std::size_t);
template std::vector<std::int64_t> count_reaching(const float*, std::size_t, const std::vector<Tensor>&,
                                                  const std::vector<float>&, std::size_t);
template std::vector<std::int64_t> count_reaching(const double*, std::size_t, const std::vector<Tensor>&,
                                                  const std::vector<double>&, std::size_t);
template Tail tail(const float*, std::size_t, const std::vector<Tensor>&, float, std::size_t);
template Tail tail(const double*, std::size_t, const std::vector<Tensor>&, double, std::size_t);
template void block_scores(const float*, std::size_t, const std::vector<Tensor>&, std::size_t, std::size_t, double*);
template void block_scores(const double*, std::size_t, const std::vector<Tensor>&, std::size_t, std::size_t, double*);
template void sample(const Step<float>&, std::size_t, std::size_t, float*);
template void sample(const Step<double>&, std::size_t, std::size_t, double*);

}  // namespace hvs
