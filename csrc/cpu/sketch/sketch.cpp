#include "sketch/sketch.hpp"

#include <algorithm>
#include <array>

#include "simd/dispatch.hpp"
#include "workspace.hpp"

namespace hvs {
namespace {

constexpr std::size_t most_rows = 5;
using Keys = std::array<std::uint64_t, most_rows>;

Keys keys_of(std::uint64_t seed) {
  Keys keys;
  for (std::size_t row = 0; row < most_rows; ++row) keys[row] = row_key(seed, row);
  return keys;
}

// The first counter of a vector in a row, relative to the counters of its section.
HVS_INLINE std::uint32_t first_counter(const Place& place, std::size_t row, std::size_t groups) {
  return std::uint32_t(lanes * (row * groups + place.group));
}

// The places of adjacent vectors, hashed together in a loop that compilers vectorise.
constexpr std::size_t batch = 64;

struct Places {
  alignas(64) std::uint32_t counter[batch], negative[batch];

  HVS_INLINE void set(std::uint64_t key, std::size_t vector, std::size_t count, std::size_t row, std::size_t groups) {
    for (std::size_t i = 0; i < count; ++i) {
      const Place p = place(key, vector + i, groups);
      counter[i] = first_counter(p, row, groups);
      negative[i] = p.negative;
    }
  }
};

// A table, because the vectors of the portable level have no shift per lane.
template <class Word>
alignas(64) constexpr Word lane_bits[lanes] = {
    1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15,
};

template <class Real> HVS_INLINE Real with_lane_sign(Real x, std::uint32_t negative, std::size_t lane) {
  using Unsigned = typename Bits<Real>::Unsigned;
  return with_sign(x, Unsigned(negative) & lane_bits<Unsigned>[lane]);
}

// The median over the rows of the estimates for lane l of vector i of the batch.
template <std::size_t rows, class Real>
HVS_INLINE Real estimate(const Real* counters, const Places* places, std::size_t i, std::size_t l) {
  Real estimates[rows];
  for (std::size_t row = 0; row < rows; ++row) {
    estimates[row] = with_lane_sign(counters[places[row].counter[i] + l], places[row].negative[i], l);
  }
  return median_of(estimates);
}

// Adds `count` lanes of vector i of a batch to the counters; `at` is the position of the first lane.
template <std::size_t rows, class Real> struct Update {
  const Real *buffer, *old;  // old: a copy of the section's counters; null where nothing is carried
  Real* counters;
  Real carried;

  HVS_INLINE void operator()(std::size_t at, std::size_t count, const Places* places, std::size_t i) const {
    const Real* const x = buffer + at;
    alignas(64) Real change[lanes];
    if (old) {
      HVS_KEEP_LOOP
      for (std::size_t l = 0; l < count; ++l) change[l] = x[l] - carried * estimate<rows>(old, places, i, l);
    } else {
      HVS_KEEP_LOOP
      for (std::size_t l = 0; l < count; ++l) change[l] = x[l];
    }
    for (std::size_t row = 0; row < rows; ++row) {
      Real* const to = counters + places[row].counter[i];
      const std::uint32_t negative = places[row].negative[i];
      HVS_KEEP_LOOP
      for (std::size_t l = 0; l < count; ++l) to[l] += with_lane_sign(change[l], negative, l);
    }
  }
};

template <std::size_t rows, bool add, class Real> struct Query {
  const Real* counters;
  Real* buffer;
  Real scale;

  HVS_INLINE void operator()(std::size_t at, std::size_t count, const Places* places, std::size_t i) const {
    Real* const out = buffer + at;
    HVS_KEEP_LOOP
    for (std::size_t l = 0; l < count; ++l) {
      const Real found = scale * estimate<rows>(counters, places, i, l);
      out[l] = add ? out[l] + found : found;
    }
  }
};

// Calls `each` for all vectors of a section. `next` points to the counters of the next section, which are prefetched at
// the offsets that this section uses.
template <std::size_t rows> struct Walk {
  template <class Each, class Real>
  static HVS_INLINE void run(Each each, std::size_t first, std::size_t last, std::size_t groups, std::size_t size,
                             const Keys* keys, const Real* next) {
    for (std::size_t begin = first; begin < last; begin += batch) {
      const std::size_t count = std::min(batch, last - begin);
      Places places[rows];
      for (std::size_t row = 0; row < rows; ++row) places[row].set((*keys)[row], begin, count, row, groups);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = (begin + i) * lanes;
        for (std::size_t row = 0; row < rows; ++row) __builtin_prefetch(next + places[row].counter[i]);
        if (size - at >= lanes) {
          each(at, lanes, places, i);
        } else {
          each(at, size - at, places, i);
        }
      }
    }
  }
};

template <std::size_t rows, class Each, class Real>
void walk(const Section<Real>& section, const Geometry& geometry, const Keys& keys, const Each& each) {
  const Real* const next = section.counters + lanes * rows * section.groups;
  run_at_level<Walk<rows>>(each, section.first, section.last, section.groups, geometry.size, &keys,
                           static_cast<const Real*>(next));
}

// Corrects an update at delivered positions: the buffer no longer contains the estimate there, so it is added back, and
// the position's share leaves each counter.
template <std::size_t rows, class Real>
void take_shares(const Section<Real>& section, const Keys& keys, const Real* old, Real carried,
                 const std::int32_t* delivered, std::size_t count, std::uint32_t* sharing) {
  std::fill_n(sharing, rows * section.groups, 0);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t vector = section.first; vector < section.last; ++vector) {
      ++sharing[row * section.groups + place(keys[row], vector, section.groups).group];
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto position = std::size_t(delivered[i]);
    const std::size_t lane = position % lanes;
    std::size_t counters[rows];
    std::uint32_t negative[rows];
    Real estimates[rows];
    for (std::size_t row = 0; row < rows; ++row) {
      const Place p = place(keys[row], position / lanes, section.groups);
      counters[row] = first_counter(p, row, section.groups) + lane;
      negative[row] = p.negative;
      estimates[row] = with_lane_sign(old[counters[row]], negative[row], lane);
    }
    const Real found = median_of(estimates);
    for (std::size_t row = 0; row < rows; ++row) {
      const Real share = old[counters[row]] / Real(sharing[counters[row] / lanes]);
      section.counters[counters[row]] += carried * (with_lane_sign(found, negative[row], lane) - share);
    }
  }
}

template <std::size_t rows, class Real>
void update_rows(const Change<Real>& change, const Geometry& geometry, const Keys& keys, Real* sketch) {
  Lease scratch(workspaces());
  const std::int32_t* delivered = change.delivered;
  const std::int32_t* const all = delivered + change.count;
  for (std::size_t s = 0; s < geometry.sections(); ++s) {
    const Section<Real> section = geometry.section(s, sketch);
    const std::size_t groups = rows * section.groups;
    Real* const old = change.carried == 0 ? nullptr : (*scratch).template get<Real>(0, lanes * groups);
    if (old) std::copy_n(section.counters, lanes * groups, old);
    walk<rows>(section, geometry, keys, Update<rows, Real>{change.buffer, old, section.counters, change.carried});
    const std::int32_t* const end = std::lower_bound(delivered, all, std::int64_t(section.last * lanes));
    if (old && delivered < end) {
      std::uint32_t* const sharing = (*scratch).template get<std::uint32_t>(1, groups);
      take_shares<rows>(section, keys, old, change.carried, delivered, std::size_t(end - delivered), sharing);
    }
    delivered = end;
  }
}

template <std::size_t rows, bool add, class Real>
void query_rows(const Real* sketch, const Geometry& geometry, const Keys& keys, Real scale, Real* buffer) {
  for (std::size_t s = 0; s < geometry.sections(); ++s) {
    const Section<const Real> section = geometry.section(s, sketch);
    walk<rows>(section, geometry, keys, Query<rows, add, Real>{section.counters, buffer, scale});
  }
}

}  // namespace

template <class Real>
void sketch_update(const Change<Real>& change, const Geometry& geometry, std::uint64_t seed, Real* sketch) {
  switch (geometry.rows) {
    case 1: return update_rows<1>(change, geometry, keys_of(seed), sketch);
    case 3: return update_rows<3>(change, geometry, keys_of(seed), sketch);
    case 5: return update_rows<5>(change, geometry, keys_of(seed), sketch);
  }
}

template <class Real>
void sketch_query(const Real* sketch, const Geometry& geometry, std::uint64_t seed, Real scale, bool add,
                  Real* buffer) {
  const auto query = [&](auto plain, auto added) {
    return (add ? added : plain)(sketch, geometry, keys_of(seed), scale, buffer);
  };
  switch (geometry.rows) {
    case 1: return query(query_rows<1, false, Real>, query_rows<1, true, Real>);
    case 3: return query(query_rows<3, false, Real>, query_rows<3, true, Real>);
    case 5: return query(query_rows<5, false, Real>, query_rows<5, true, Real>);
  }
}

template void sketch_update(const Change<float>&, const Geometry&, std::uint64_t, float*);
template void sketch_update(const Change<double>&, const Geometry&, std::uint64_t, double*);
template void sketch_query(const float*, const Geometry&, std::uint64_t, float, bool, float*);
template void sketch_query(const double*, const Geometry&, std::uint64_t, double, bool, double*);

}  // namespace hvs
