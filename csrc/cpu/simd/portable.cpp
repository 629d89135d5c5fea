// The loops in standard C++, for every machine and for float64 buffers. Written so that compilers vectorise them.
#include "gradient.hpp"
#include "simd/lanes.hpp"
#include "simd/level.hpp"

namespace hvs {
namespace {

constexpr std::size_t block = 64, part = 8;  // elements that are tested together for candidates

template <bool fresh, class Real> void accumulate_as(const Real* gradient, Real* buffer, std::size_t n, Real scale) {
  for (std::size_t i = 0; i < n; ++i) buffer[i] = (fresh ? Real(0) : scale * buffer[i]) + gradient[i];
}

template <class Real> void accumulate(const Real* gradient, Real* buffer, std::size_t n, Real scale) {
  if (scale == 0) {
    accumulate_as<true>(gradient, buffer, n, scale);
  } else {
    accumulate_as<false>(gradient, buffer, n, scale);
  }
}

template <class Real>
void update_velocity(const Real* gradient, Real* values, std::size_t n, const Velocity<Real>& how, Real* added) {
  update_velocity_lanes(gradient, values, n, how, added);
}

template <class Real> Sums measure(const Real* gradient, Real* buffer, std::size_t n, Real scale) {
  return measure_lanes<2>(gradient, buffer, n, scale);
}

template <class Real> double square(const Real* x, std::size_t n) { return square_lanes<2>(x, n); }

template <class Real> Tail tail(const Real* x, std::size_t n, Real low) { return tail_lanes<2>(x, n, low); }

template <class Real> void count(const Real* x, std::size_t n, const Real* low, std::int64_t* counts) {
  count_reaching<16 / sizeof(Real)>(x, n, low, counts);
}

template <class Real> inline bool any_reaches(const Real* x, std::size_t n, Key<Real> low) {
  Key<Real> any = 0;
  for (std::size_t i = 0; i < n; ++i) any |= magnitude(x[i]) >= low;
  return any;
}

// Writes first + i for each of the n elements that reaches `low`; returns their number.
template <class Real>
inline std::size_t list(const Real* x, std::size_t n, Key<Real> low, std::int32_t first, std::int32_t* indices) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < n; ++i) {
    indices[count] = first + std::int32_t(i);
    count += magnitude(x[i]) >= low;
  }
  return count;
}

// One pass, so that memory reads overlap with comparisons: first a block without branches, then its candidates.
template <bool fresh, class Real>
std::size_t scan_as(const Real* gradient, Real* buffer, std::size_t n, Real scale, Key<Real> low, std::int32_t first,
                    std::int32_t* indices) {
  std::size_t i = 0, count = 0;
  for (; i + block <= n; i += block) {
    Key<Real> any = 0;
    for (std::size_t j = i; j < i + block; ++j) {
      buffer[j] = (fresh ? Real(0) : scale * buffer[j]) + gradient[j];
      any |= magnitude(buffer[j]) >= low;
    }
    for (std::size_t j = i; any && j < i + block; j += part) {
      if (!any_reaches(buffer + j, part, low)) continue;
      count += list(buffer + j, part, low, first + std::int32_t(j), indices + count);
    }
  }
  accumulate_as<fresh>(gradient + i, buffer + i, n - i, scale);
  return count + list(buffer + i, n - i, low, first + std::int32_t(i), indices + count);
}

template <class Real>
std::size_t scan(const Real* gradient, Real* buffer, std::size_t n, Real scale, Key<Real> low, std::int32_t first,
                 std::int32_t* indices) {
  return scale == 0 ? scan_as<true>(gradient, buffer, n, scale, low, first, indices)
                    : scan_as<false>(gradient, buffer, n, scale, low, first, indices);
}

// Like scan_as, but computes a block on the stack.
template <bool fresh, class Real>
std::size_t scan_apart_as(const Real* gradient, const Real* source, Real* buffer, std::size_t n, Real scale,
                          Key<Real> below, Key<Real> most, std::int32_t first, std::int32_t* indices) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < n; i += block) {
    Real acc[block];
    const std::size_t m = std::min(block, n - i);
    Key<Real> any = 0;
    for (std::size_t j = 0; j < m; ++j) {
      acc[j] = (fresh ? Real(0) : scale * source[i + j]) + gradient[i + j];
      any |= magnitude(acc[j]) > below;
      buffer[i + j] = magnitude(acc[j]) > most ? Real(0) : acc[j];
    }
    for (std::size_t j = 0; any && j < m; ++j) {
      indices[count] = first + std::int32_t(i + j);
      count += magnitude(acc[j]) > below;
    }
  }
  return count;
}

template <class Real>
std::size_t scan_apart(const Real* gradient, const Real* source, Real* buffer, std::size_t n, Real scale,
                       Key<Real> below, Key<Real> most, std::int32_t first, std::int32_t* indices) {
  return scale == 0 ? scan_apart_as<true>(gradient, source, buffer, n, scale, below, most, first, indices)
                    : scan_apart_as<false>(gradient, source, buffer, n, scale, below, most, first, indices);
}

template <class Real>
void filter(const Entries<Real>& from, std::size_t first, std::size_t last, Range<Key<Real>> range,
            Entries<Real>& to, std::size_t room) {
  for (std::size_t i = first; i < last && to.count < room; ++i) {
    to.indices[to.count] = from.indices[i];
    to.values[to.count] = from.values[i];
    const Key<Real> key = magnitude(from.values[i]);
    to.count += (key > range.above) & (key <= range.upto);
  }
}

// Writes eight indices at a time, even if a word has fewer bits: a CPU cannot predict their number, but can usually
// predict that it does not exceed eight.
std::size_t list_bits(const std::uint64_t* words, std::size_t count, std::size_t first, std::int32_t* indices) {
  constexpr std::size_t batch = 8;
  constexpr std::uint64_t last = std::uint64_t(1) << (word - 1);
  std::size_t listed = 0;
  for (std::size_t w = 0; w < count; ++w) {
    std::uint64_t bits = words[w];
    if (!bits) continue;
    const std::size_t end = listed + std::size_t(__builtin_popcountll(bits));
    for (; listed < end; listed += batch) {
      for (std::size_t i = 0; i < batch; ++i, bits &= bits - 1) {
        indices[listed + i] = std::int32_t(first + w * word + std::size_t(__builtin_ctzll(bits | last)));
      }
    }
    listed = end;
  }
  return listed;
}

template <class Real>
constexpr Loops<Real> portable = {load_adjacent<Half, Real>, accumulate<Real>, update_velocity<Real>, measure<Real>,
                                  square<Real>, tail<Real>, count<Real>, scan<Real>, scan_apart<Real>, filter<Real>,
                                  list_bits};

}  // namespace

const Loops<float> portable_float = portable<float>;
const Loops<double> portable_double = portable<double>;

}  // namespace hvs
