// The layout of a count sketch (Charikar, Chen and Farach-Colton, ICALP 2002) for streaming access.
//
// In the textbook sketch, each element maps to a counter anywhere in its row: one cache miss per element. Here
// - positions are divided into sections with separate counters, which stay in the cache while the section is processed;
// - a vector of `lanes` adjacent positions maps to one group of `lanes` counters, lane l to counter l.
// The group is drawn per vector and row, the sign per element and row, both from one hash.
//
// Signs are independent, so the query is unbiased. Elements of the same lane and section share a counter with
// probability 1 / groups; other elements never do. A lane of a section with N_s positions and w_s = lanes * groups
// counters in a row has at most N_s / lanes + 1 elements. For one row, the sum over all pairs is therefore at most that
// of the textbook sketch,
//   E ||query(sketch(x)) - x||^2  <=  sum over sections of N_s / w_s ||x_s||^2,  about n / w ||x||^2,
// and the median over more rows bounds the tails.
#pragma once

#include "bits.hpp"
#include "mix.hpp"

namespace hvs {

constexpr std::size_t lanes = 16;
constexpr std::size_t section_vectors = 1024;

// The vectors first .. last of a section, and its counters: `groups` groups for each row, one row after another.
template <class Real> struct Section {
  std::size_t first, last;
  Real* counters;
  std::size_t groups;
};

// Distribution of a bucket of `size` positions over `groups` groups in each of `rows` rows. Sections differ by at most
// one vector and by at most one group, so that no section has less than its share of the counters.
struct Geometry {
  std::size_t size, rows, groups;

  HVS_FUNCTION std::size_t vectors() const { return (size + lanes - 1) / lanes; }
  HVS_FUNCTION std::size_t sections() const { return (vectors() + section_vectors - 1) / section_vectors; }
  HVS_FUNCTION std::size_t length() const { return lanes * rows * groups; }

  // The number of groups of a sketch as long as the bucket, or of the shortest possible sketch if that has more.
  HVS_FUNCTION std::size_t most_groups() const {
    const std::size_t fitting = size / (lanes * rows);
    return fitting > sections() ? fitting : sections();
  }

  // With groups >= sections(), every section has at least one group.
  template <class Real> HVS_FUNCTION Section<Real> section(std::size_t s, Real* sketch) const {
    const std::size_t begin = groups * s / sections(), end = groups * (s + 1) / sections();
    return {vectors() * s / sections(), vectors() * (s + 1) / sections(), sketch + lanes * rows * begin, end - begin};
  }
};

// The hash key of a row.
HVS_FUNCTION std::uint64_t row_key(std::uint64_t seed, std::size_t row) { return random_bits(mix(seed), row); }

// The place of a vector in a row: its group, and a bit per lane that is set where the sign is negative. Encoding and
// decoding both use place().
struct Place {
  std::uint32_t group, negative;
};

HVS_FUNCTION Place place(std::uint64_t key, std::size_t vector, std::size_t groups) {
  const std::uint64_t hash = random_bits(key, vector);
  return {std::uint32_t((hash >> 32) * groups >> 32), std::uint32_t(hash & 0xffff)};
}

// Returns -x if any bit of `negative` is set, else x.
template <class Real> HVS_FUNCTION Real with_sign(Real x, typename Bits<Real>::Unsigned negative) {
  using Unsigned = typename Bits<Real>::Unsigned;
  constexpr Unsigned sign = Unsigned(1) << Bits<Real>::width;
  return bit_cast<Real>(bit_cast<Unsigned>(x) ^ (negative ? sign : 0));
}

// Comparisons are false for NaN, on every device.
template <class Real> HVS_FUNCTION Real smaller(Real a, Real b) { return a < b ? a : b; }
template <class Real> HVS_FUNCTION Real larger(Real a, Real b) { return a < b ? b : a; }

template <class Real> HVS_FUNCTION Real median_of(const Real (&x)[1]) { return x[0]; }
template <class Real> HVS_FUNCTION Real median_of(const Real (&x)[3]) {
  return larger(smaller(x[0], x[1]), smaller(larger(x[0], x[1]), x[2]));
}
// Of the first four of five numbers, neither the smallest nor the largest can be the median of all five.
template <class Real> HVS_FUNCTION Real median_of(const Real (&x)[5]) {
  const Real inner[3] = {larger(smaller(x[0], x[1]), smaller(x[2], x[3])),
                         smaller(larger(x[0], x[1]), larger(x[2], x[3])), x[4]};
  return median_of(inner);
}

}  // namespace hvs
