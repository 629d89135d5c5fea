#include "select/sweep.hpp"

#include <algorithm>
#include <vector>

#include "parallel.hpp"
#include "select/rank.hpp"
#include "simd/level.hpp"
#include "tiles.hpp"

namespace hvs {
namespace {

// The result of one thread for its part of the bucket.
template <class Real> struct Part {
  Entries<Real> candidates;
  Key<Real>* middle;  // keys of the candidates below bracket.high, which have to be ranked
  std::size_t middle_count;
  bool overflowed;
};

template <class Real> std::size_t room(const Plan<Real>& plan) { return plan.capacity + tile_size + padding; }

template <class Real> std::vector<Part<Real>> make_parts(const Plan<Real>& plan, Workspace& scratch) {
  const std::size_t size = room(plan);
  std::vector<Part<Real>> parts;
  for (std::size_t i = 0; i < plan.threads; ++i) {
    const Entries<Real> none = {scratch.get<std::int32_t>(3 * i + 1, size), scratch.get<Real>(3 * i + 2, size), 0};
    parts.push_back({none, scratch.get<Key<Real>>(3 * i + 3, size), 0, false});
  }
  return parts;
}

// Completes `found` more candidates, whose indices are already written. The buffer becomes zero, or is zero already,
// where they will most likely be taken. The tile is still in the L1 cache.
template <class Real>
void collect(Part<Real>& part, std::size_t found, Bracket<Key<Real>> bracket, const Tile<Real>& tile, Real scale) {
  Entries<Real>& candidates = part.candidates;
  const std::size_t end = candidates.count + found;
  std::size_t middle = part.middle_count;
  for (std::size_t i = candidates.count; i < end; ++i) {
    const Real x = take_scanned(tile, scale, bracket.guess, candidates.indices[i]);
    candidates.values[i] = x;
    part.middle[middle] = magnitude(x);
    middle += magnitude(x) < bracket.high;
  }
  part.middle_count = middle;
  candidates.count = end;
}

// Sweeps begin .. end. Once the candidates could exceed the capacity, the rest is only accumulated.
template <class Real>
void sweep(const Step<Real>& step, std::size_t begin, std::size_t end, const Plan<Real>& plan, Part<Real>& part) {
  for_each_tile(step, begin, end, [&](const Tile<Real>& tile) {
    part.overflowed |= part.candidates.count > plan.capacity;
    if (part.overflowed) return accumulate_tile(tile, step.scale);
    std::int32_t* const indices = part.candidates.indices + part.candidates.count;
    const std::size_t found = scan_tile(tile, step.scale, plan.bracket.low, plan.bracket.guess, indices);
    collect(part, found, plan.bracket, tile, step.scale);
  });
}

// Restores the entries that the sweep replaced by zero.
template <class Real> void restore(const std::vector<Part<Real>>& parts, Key<Real> guess, Real* buffer) {
  for (const Part<Real>& part : parts) {
    const Entries<Real>& found = part.candidates;
    for (std::size_t i = 0; i < found.count; ++i) {
      if (magnitude(found.values[i]) >= guess) buffer[found.indices[i]] = found.values[i];
    }
  }
}

// The cut of the `total` >= k candidates. Normally only those inside the bracket have to be ranked.
template <class Real>
Cut<Key<Real>> find_cut(const std::vector<Part<Real>>& parts, std::size_t total, std::size_t k,
                        Bracket<Key<Real>> bracket, Key<Real>* keys) {
  Key<Real>* end = keys;
  for (const Part<Real>& part : parts) end = std::copy_n(part.middle, part.middle_count, end);
  const auto middle = std::size_t(end - keys), above = total - middle;
  if (above < k) return cut_at(keys, middle, k - above, bracket.low, bracket.high);
  end = keys;
  for (const Part<Real>& part : parts) {
    const Real* const values = part.candidates.values;
    end = std::transform(values, values + part.candidates.count, end, magnitude<Real>);
  }
  return cut_at(keys, total, k, bracket.low, largest_key<Real>);
}

// The end of the candidates that use up the cut's ties; subtracts the ties found from the cut.
template <class Real> std::size_t last_tie(const Entries<Real>& found, Cut<Key<Real>>& cut) {
  constexpr std::size_t block = 64;  // ties are few: a vectorised loop skips most blocks
  const auto ties = [&](std::size_t first, std::size_t last) {
    Key<Real> count = 0;
    for (std::size_t i = first; i < last; ++i) count += magnitude(found.values[i]) == cut.threshold;
    return std::size_t(count);
  };
  std::size_t i = 0;
  for (std::size_t n; cut.ties > 0 && i < found.count; i += n) {
    n = std::min(block, found.count - i);
    if (ties(i, i + n) > cut.ties) n = 1;
    cut.ties -= ties(i, i + n);
  }
  return i;
}

constexpr std::size_t chunk = 1024;  // candidates that stay in the L1 cache for both passes over them

// Corrects the buffer for at most `chunk` candidates: those above `zeroed` are zero in it, those above `limit` must be.
template <class Real>
void correct(const Entries<Real>& found, std::size_t first, std::size_t last, Key<Real> limit, Key<Real> zeroed,
             Real* buffer) {
  std::int32_t indices[chunk + padding];
  Real values[chunk + padding];
  Entries<Real> wrong = {indices, values, 0};
  loops<Real>().filter(found, first, last, {std::min(limit, zeroed), std::max(limit, zeroed)}, wrong, chunk + padding);
  for (std::size_t i = 0; i < wrong.count; ++i) buffer[indices[i]] = zeroed < limit ? values[i] : Real(0);
}

// Takes the candidates first .. last that are above `limit`, and corrects the buffer.
template <class Real>
void settle(const Entries<Real>& found, std::size_t first, std::size_t last, Key<Real> limit, Key<Real> guess,
            Real* buffer, Entries<Real>& taken, std::size_t room) {
  for (std::size_t i = first; i < last; i += chunk) {
    const std::size_t end = std::min(i + chunk, last);
    loops<Real>().filter(found, i, end, {limit, largest_key<Real>}, taken, room);
    correct(found, i, end, limit, guess - 1, buffer);
  }
}

// Moves the candidates that the cut takes to indices and values, which hold k entries.
template <class Real>
void take(const std::vector<Part<Real>>& parts, Cut<Key<Real>> cut, Key<Real> guess, Real* buffer, std::size_t k,
          std::int32_t* indices, Real* values) {
  Entries<Real> taken = {indices, values, 0};
  for (const Part<Real>& part : parts) {
    const Entries<Real>& found = part.candidates;
    const std::size_t split = last_tie(found, cut);
    settle(found, 0, split, cut.threshold - 1, guess, buffer, taken, k);
    settle(found, split, found.count, cut.threshold, guess, buffer, taken, k);
  }
}

}  // namespace

template <class Real>
bool sweep_select(const Step<Real>& step, std::size_t k, const Plan<Real>& plan, Workspace& scratch,
                  std::int32_t* indices, Real* values) {
  // All memory is reserved before anything is written.
  std::vector<Part<Real>> parts = make_parts(plan, scratch);
  Key<Real>* const keys = scratch.get<Key<Real>>(0, plan.threads * room(plan));
  parallel(plan.threads, [&](std::size_t i) {
    const std::size_t begin = part_begin(step.size, i, plan.threads), end = part_begin(step.size, i + 1, plan.threads);
    sweep(step, begin, end, plan, parts[i]);
  });
  std::size_t total = 0;
  bool overflowed = false;
  for (const Part<Real>& part : parts) {
    total += part.candidates.count;
    overflowed |= part.overflowed;
  }
  if (overflowed || total < k) {
    restore(parts, plan.bracket.guess, step.buffer);
    return false;
  }
  const Cut<Key<Real>> cut = find_cut(parts, total, k, plan.bracket, keys);
  take(parts, cut, plan.bracket.guess, step.buffer, k, indices, values);
  return true;
}

template bool sweep_select(const Step<float>&, std::size_t, const Plan<float>&, Workspace&, std::int32_t*, float*);
template bool sweep_select(const Step<double>&, std::size_t, const Plan<double>&, Workspace&, std::int32_t*, double*);

}  // namespace hvs
