#include "select/select.hpp"

#include <algorithm>

#include "parallel.hpp"
#include "select/exact.hpp"
#include "select/hooks.hpp"
#include "select/sample.hpp"
#include "select/sweep.hpp"
#include "tiles.hpp"

namespace hvs {
namespace {

// Below this size the buffer stays in the cache, and radix selection costs less than sampling would save.
constexpr std::size_t small = 1 << 14;
// Above a density of 1 / dense, the candidates would take as much memory and time as the buffer itself.
constexpr std::size_t dense = 8;

// k == active: takes everything.
template <class Real> void take_all(const Step<Real>& step, std::int32_t* indices, Real* values) {
  std::size_t taken = 0;
  for_each_tile(step, 0, step.size, [&](const Tile<Real>& tile) {
    accumulate_tile(tile, step.scale);
    std::copy_n(tile.buffer, tile.count, values + taken);
    std::fill_n(tile.buffer, tile.count, Real(0));
    for (std::size_t i = 0; i < tile.count; ++i) indices[taken + i] = std::int32_t(tile.first + i);
    taken += tile.count;
  });
}

template <class Real>
Plan<Real> make_plan(const Step<Real>& step, std::size_t k, std::size_t threads, Workspace& scratch) {
  if (const hooks::Forced* const forced = hooks::forced()) {
    const auto key = [](double x) { return magnitude(Real(x)); };
    return {{key(forced->low), key(forced->guess), key(forced->high)}, forced->capacity, threads};
  }
  const Estimate<Real> found = estimate(step, k, scratch);
  return {found.bracket, found.candidates, threads};
}

}  // namespace

template <class Real> void accumulate(const Step<Real>& step, std::size_t threads) {
  parallel(threads, [&](std::size_t part) {
    const std::size_t begin = part_begin(step.size, part, threads), end = part_begin(step.size, part + 1, threads);
    for_each_tile(step, begin, end, [&](const Tile<Real>& tile) { accumulate_tile(tile, step.scale); });
  });
}

template <class Real>
void select(const Step<Real>& step, std::size_t k, std::size_t threads, std::int32_t* indices, Real* values) {
  const std::size_t active = step.active();
  if (k == 0) return accumulate(step, threads);
  if (k == active) return take_all(step, indices, values);
  if (!hooks::forced() && (active < small || k > active / dense)) {
    accumulate(step, threads);
    return exact_select(step, k, Key<Real>(0), indices, values);
  }
  Lease scratch(workspaces());
  const Plan<Real> plan = make_plan(step, k, threads, *scratch);
  if (sweep_select(step, k, plan, *scratch, indices, values)) return;
  hooks::count_fallback();
  exact_select(step, k, plan.bracket.guess, indices, values);
}

template void accumulate(const Step<float>&, std::size_t);
template void accumulate(const Step<double>&, std::size_t);
template void select(const Step<float>&, std::size_t, std::size_t, std::int32_t*, float*);
template void select(const Step<double>&, std::size_t, std::size_t, std::int32_t*, double*);

}  // namespace hvs
