#include "vectors/pair.hpp"

#include <algorithm>
#include <cstring>

namespace hvs {
namespace {

// Returns x if wanted, else the neutral element; does not branch.
template <class Real> inline Real only_if(bool wanted, Real x) {
  using Unsigned = typename Bits<Real>::Unsigned;
  Unsigned bits, other;
  std::memcpy(&bits, &x, sizeof x);
  std::memcpy(&other, &neutral<Real>, sizeof x);
  bits = other ^ ((bits ^ other) & (Unsigned(0) - wanted));
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The remaining entries of a vector that is consumed from both ends.
template <class Real> struct Rest {
  const std::int32_t* indices;
  const Real* values;
  std::size_t first, last;

  std::size_t count() const { return last - first; }
};

// Takes the lowest index out of both vectors, or out of the vector that has it.
template <class Real> inline void take_lowest(Rest<Real>& a, Rest<Real>& b, std::int32_t& index, Real& value) {
  const std::int32_t i = a.indices[a.first], j = b.indices[b.first];
  const bool of_a = i <= j, of_b = j <= i;
  index = std::min(i, j);
  value = only_if(of_a, a.values[a.first]) + only_if(of_b, b.values[b.first]);
  a.first += of_a;
  b.first += of_b;
}

template <class Real> inline void take_highest(Rest<Real>& a, Rest<Real>& b, std::int32_t& index, Real& value) {
  const std::int32_t i = a.indices[a.last - 1], j = b.indices[b.last - 1];
  const bool of_a = i >= j, of_b = j >= i;
  index = std::max(i, j);
  value = only_if(of_a, a.values[a.last - 1]) + only_if(of_b, b.values[b.last - 1]);
  a.last -= of_a;
  b.last -= of_b;
}

}  // namespace

// Alternates between both ends: each step waits for the loads and the comparison of the previous step, so two
// independent chains take little longer than one.
template <class Real>
std::size_t merge_pair(const Sparse<Real>& a, const Sparse<Real>& b, std::size_t room, std::int32_t* indices,
                       Real* values) {
  Rest<Real> of_a = {a.indices, a.values, 0, a.count}, of_b = {b.indices, b.values, 0, b.count};
  std::size_t low = 0, high = room;  // written so far: 0 .. low and high .. room
  while (of_a.count() >= 2 && of_b.count() >= 2) {
    take_lowest(of_a, of_b, indices[low], values[low]);
    ++low;
    --high;
    take_highest(of_a, of_b, indices[high], values[high]);
  }
  for (; of_a.count() && of_b.count(); ++low) take_lowest(of_a, of_b, indices[low], values[low]);
  for (const Rest<Real>& rest : {of_a, of_b}) {
    std::copy_n(rest.indices + rest.first, rest.count(), indices + low);
    std::copy_n(rest.values + rest.first, rest.count(), values + low);
    low += rest.count();
  }
  std::copy(indices + high, indices + room, indices + low);
  std::copy(values + high, values + room, values + low);
  return low + (room - high);
}

template std::size_t merge_pair(const Sparse<float>&, const Sparse<float>&, std::size_t, std::int32_t*, float*);
template std::size_t merge_pair(const Sparse<double>&, const Sparse<double>&, std::size_t, std::int32_t*, double*);

}  // namespace hvs
