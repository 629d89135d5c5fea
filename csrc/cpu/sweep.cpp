#include "sweep.hpp"

#include <algorithm>
#include <vector>

#include "level.hpp"
#include "parallel.hpp"
#include "rank.hpp"
#include "tiles.hpp"

namespace hvs {
namespace {

// What one thread found in its part of the bucket.
template <class Real> struct Part {
  Entries<Real> candidates;
  bool overflowed;
};

template <class Real> std::vector<Part<Real>> make_parts(const Plan<Real>& plan, std::size_t room, Workspace& scratch) {
  std::vector<Part<Real>> parts;
  for (std::size_t i = 0; i < plan.threads; ++i) {
    const Entries<Real> none = {scratch.get<std::int32_t>(1 + 2 * i, room), scratch.get<Real>(2 + 2 * i, room), 0};
    parts.push_back({none, false});
  }
  return parts;
}

// Sweeps begin .. end. Once the candidates could exceed the capacity the rest is only accumulated.
template <class Real>
void sweep(const Step<Real>& step, std::size_t begin, std::size_t end, const Plan<Real>& plan, Part<Real>& part) {
  const Loops<Real>& use = loops<Real>();
  const auto active = [&](const Real* gradient, std::size_t first, std::size_t n) {
    part.overflowed |= part.candidates.count > plan.capacity;
    if (part.overflowed) return use.accumulate(gradient, step.buffer + first, n, step.scale);
    use.sweep(gradient, step.buffer + first, n, step.scale, plan.bracket, std::int32_t(first), part.candidates);
  };
  for_each_tile(step, begin, end, active, [&](std::size_t from, std::size_t to) { scale_held(step, from, to); });
}

// Puts back what the sweep replaced by zero.
template <class Real> void restore(const std::vector<Part<Real>>& parts, Key<Real> guess, Real* buffer) {
  for (const Part<Real>& part : parts) {
    const Entries<Real>& found = part.candidates;
    for (std::size_t i = 0; i < found.count; ++i) {
      if (magnitude(found.values[i]) >= guess) buffer[found.indices[i]] = found.values[i];
    }
  }
}

// Copies the candidates' keys that are below `high`; returns how many.
template <class Real> std::size_t keys_below(const std::vector<Part<Real>>& parts, Key<Real> high, Key<Real>* keys) {
  std::size_t count = 0;
  for (const Part<Real>& part : parts) {
    for (std::size_t i = 0; i < part.candidates.count; ++i) {
      const Key<Real> key = magnitude(part.candidates.values[i]);
      keys[count] = key;
      count += key < high;
    }
  }
  return count;
}

// Where to cut the `total` >= k candidates. Normally only those between the bracket's ends have to be ranked.
template <class Real>
Cut<Key<Real>> find_cut(const std::vector<Part<Real>>& parts, std::size_t total, std::size_t k,
                        Bracket<Key<Real>> bracket, Key<Real>* keys) {
  const std::size_t middle = keys_below(parts, bracket.high, keys), above = total - middle;
  if (above < k) return cut_at(keys, middle, k - above, bracket.low, bracket.high);
  std::size_t count = 0;
  for (const Part<Real>& part : parts) {
    for (std::size_t i = 0; i < part.candidates.count; ++i) keys[count++] = magnitude(part.candidates.values[i]);
  }
  return cut_at(keys, count, k, bracket.low, largest_key<Real>);
}

// Behind which candidate the cut's ties are used up; takes them off the cut.
template <class Real> std::size_t last_tie(const Entries<Real>& found, Cut<Key<Real>>& cut) {
  std::size_t i = 0;
  for (; cut.ties > 0 && i < found.count; ++i) cut.ties -= magnitude(found.values[i]) == cut.threshold;
  return i;
}

// Takes the candidates first .. last that are above `limit`, and corrects the buffer where the guess decided otherwise.
template <class Real>
void settle(const Entries<Real>& found, std::size_t first, std::size_t last, Key<Real> limit, Key<Real> guess,
            Real* buffer, Entries<Real>& taken, std::size_t room) {
  loops<Real>().filter(found, first, last, limit, taken, room);
  for (std::size_t i = first; i < last; ++i) {
    const Key<Real> key = magnitude(found.values[i]);
    if ((key > limit) != (key >= guess)) buffer[found.indices[i]] = key > limit ? Real(0) : found.values[i];
  }
}

}  // namespace

template <class Real>
bool sweep_select(const Step<Real>& step, std::size_t k, const Plan<Real>& plan, Workspace& scratch,
                  std::int32_t* indices, Real* values) {
  const std::size_t room = plan.capacity + tile_size + Entries<Real>::padding;
  std::vector<Part<Real>> parts = make_parts(plan, room, scratch);
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
  Cut<Key<Real>> cut = find_cut(parts, total, k, plan.bracket, scratch.get<Key<Real>>(0, total));
  Entries<Real> taken = {indices, values, 0};
  for (const Part<Real>& part : parts) {
    const std::size_t split = last_tie(part.candidates, cut);
    settle(part.candidates, 0, split, cut.threshold - 1, plan.bracket.guess, step.buffer, taken, k);
    settle(part.candidates, split, part.candidates.count, cut.threshold, plan.bracket.guess, step.buffer, taken, k);
  }
  return true;
}

template bool sweep_select(const Step<float>&, std::size_t, const Plan<float>&, Workspace&, std::int32_t*, float*);
template bool sweep_select(const Step<double>&, std::size_t, const Plan<double>&, Workspace&, std::int32_t*, double*);

}  // namespace hvs
