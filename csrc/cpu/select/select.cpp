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

// Below this size the buffer stays in the cache, where radix selection costs less than sampling saves.
constexpr std::size_t small = 1 << 14;
// Above this density the candidates would take memory and time like the buffer itself.
constexpr std::size_t dense = 8;

// k == active: everything leaves.
template <class Real> void take_all(const Step<Real>& step, std::int32_t* indices, Real* values) {
  std::size_t taken = 0;
  const auto active = [&](const Real* gradient, std::size_t first, std::size_t n) {
    loops<Real>().accumulate(gradient, step.buffer + first, n, step.scale);
    std::copy_n(step.buffer + first, n, values + taken);
    std::fill_n(step.buffer + first, n, Real(0));
    for (std::size_t i = 0; i < n; ++i) indices[taken + i] = std::int32_t(first + i);
    taken += n;
  };
  for_each_tile(step, 0, step.size, active, [&](std::size_t begin, std::size_t end) { scale_held(step, begin, end); });
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
    const auto active = [&](const Real* gradient, std::size_t first, std::size_t n) {
      loops<Real>().accumulate(gradient, step.buffer + first, n, step.scale);
    };
    const auto held = [&](std::size_t begin, std::size_t end) { scale_held(step, begin, end); };
    for_each_tile(step, part_begin(step.size, part, threads), part_begin(step.size, part + 1, threads), active, held);
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
