// Count sketch (Charikar, Chen and Farach-Colton, ICALP 2002), laid out for streaming: where its counters are.
//
// In the textbook's sketch every element goes to a counter anywhere in its row: one cache miss per element. Here
// - the positions are divided into sections with counters of their own, which stay in the cache while the section passes;
// - a vector of `lanes` adjacent positions goes as a whole to one group of `lanes` counters, lane l to counter l.
// The group is drawn per vector and row, the sign per element and row, both from one hash.
//
// Signs are independent, so the query is unbiased. Elements of one lane of one section share a counter with probability
// 1 / groups, others never; a lane of a section with N_s positions and w_s = lanes * groups counters in a row has at most
// N_s / lanes + 1 elements. For one row, the sum over all pairs is therefore at most that of the textbook's sketch,
//   E ||query(sketch(x)) - x||^2  <=  sum over sections of N_s / w_s ||x_s||^2,  about n / w ||x||^2,
// and the median over more rows bounds the tails.
#pragma once

#include "bits.hpp"
#include "mix.hpp"

namespace hvs {

constexpr std::size_t lanes = 16;
constexpr std::size_t section_vectors = 1024;

// A section's vectors first .. last, and its counters: `groups` groups for the first row, as many for the second ...
template <class Real> struct Section {
  std::size_t first, last;
  Real* counters;
  std::size_t groups;
};

// How a bucket of `size` positions is spread over `groups` groups in each of `rows` rows. Sections differ by at most one
// vector, and by at most one group, so that no section has less than its share of the counters.
struct Geometry {
  std::size_t size, rows, groups;

  HVS_FUNCTION std::size_t vectors() const { return (size + lanes - 1) / lanes; }
  HVS_FUNCTION std::size_t sections() const { return (vectors() + section_vectors - 1) / section_vectors; }
  HVS_FUNCTION std::size_t length() const { return lanes * rows * groups; }

  // Of a sketch that is as long as the bucket, or as short as one can be.
  HVS_FUNCTION std::size_t most_groups() const {
    const std::size_t fitting = size / (lanes * rows);
    return fitting > sections() ? fitting : sections();
  }

  // Of groups >= sections() every section has at least one.
  template <class Real> HVS_FUNCTION Section<Real> section(std::size_t s, Real* sketch) const {
    const std::size_t begin = groups * s / sections(), end = groups * (s + 1) / sections();
    return {vectors() * s / sections(), vectors() * (s + 1) / sections(), sketch + lanes * rows * begin, end - begin};
  }
};

// What the hashes of a row are made with.
HVS_FUNCTION std::uint64_t row_key(std::uint64_t seed, std::size_t row) { return random_bits(mix(seed), row); }

// Where a vector goes in a row: a group of the row, and a bit per lane that is set where the sign is negative.
// Encoding and decoding both come here.
struct Place {
  std::uint32_t group, negative;
};

HVS_FUNCTION Place place(std::uint64_t key, std::size_t vector, std::size_t groups) {
  const std::uint64_t hash = random_bits(key, vector);
  return {std::uint32_t((hash >> 32) * groups >> 32), std::uint32_t(hash & 0xffff)};
}

// -x if the bits of `negative` are not all zero.
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
// Of the first four of five, neither the smallest nor the largest can be the median of all.
template <class Real> HVS_FUNCTION Real median_of(const Real (&x)[5]) {
  const Real inner[3] = {larger(smaller(x[0], x[1]), smaller(x[2], x[3])),
                         smaller(larger(x[0], x[1]), larger(x[2], x[3])), x[4]};
  return median_of(inner);
}

}  // namespace hvs
