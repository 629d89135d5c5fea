// Standard C++: the loops of every machine, and of float64 buffers. Written so that compilers vectorise them.
#include "level.hpp"

namespace hvs {
namespace {

constexpr std::size_t block = 32;  // elements between two looks at whether there are candidates

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

template <class Real> inline void append(Entries<Real>& entries, std::int32_t index, Real value, bool wanted) {
  entries.indices[entries.count] = index;
  entries.values[entries.count] = value;
  entries.count += wanted;
}

// One block, at most `block` elements: first without branches, then the candidates if there are any.
template <bool fresh, class Real>
inline void sweep_block(const Real* gradient, Real* buffer, std::size_t n, Real scale, Bracket<Key<Real>> bracket,
                        std::int32_t first, Entries<Real>& candidates) {
  Real acc[block];
  Key<Real> any = 0;
  for (std::size_t i = 0; i < n; ++i) {
    acc[i] = (fresh ? Real(0) : scale * buffer[i]) + gradient[i];
    const Key<Real> key = magnitude(acc[i]);
    buffer[i] = key >= bracket.guess ? Real(0) : acc[i];
    any |= key >= bracket.low;
  }
  if (!any) return;
  for (std::size_t i = 0; i < n; ++i) {
    append(candidates, first + std::int32_t(i), acc[i], magnitude(acc[i]) >= bracket.low);
  }
}

template <bool fresh, class Real>
void sweep_as(const Real* gradient, Real* buffer, std::size_t n, Real scale, Bracket<Key<Real>> bracket,
              std::int32_t first, Entries<Real>& candidates) {
  std::size_t i = 0;
  for (; i + block <= n; i += block) {
    sweep_block<fresh>(gradient + i, buffer + i, block, scale, bracket, first + std::int32_t(i), candidates);
  }
  sweep_block<fresh>(gradient + i, buffer + i, n - i, scale, bracket, first + std::int32_t(i), candidates);
}

template <class Real>
void sweep(const Real* gradient, Real* buffer, std::size_t n, Real scale, Bracket<Key<Real>> bracket,
           std::int32_t first, Entries<Real>& candidates) {
  if (scale == 0) {
    sweep_as<true>(gradient, buffer, n, scale, bracket, first, candidates);
  } else {
    sweep_as<false>(gradient, buffer, n, scale, bracket, first, candidates);
  }
}

template <class Real>
void filter(const Entries<Real>& from, std::size_t first, std::size_t last, Key<Real> limit, Entries<Real>& to,
            std::size_t room) {
  for (std::size_t i = first; i < last && to.count < room; ++i) {
    append(to, from.indices[i], from.values[i], magnitude(from.values[i]) > limit);
  }
}

}  // namespace

const Loops<float> portable_float = {accumulate<float>, sweep<float>, filter<float>};
const Loops<double> portable_double = {accumulate<double>, sweep<double>, filter<double>};

}  // namespace hvs
