#ifdef HOROVOD_SPARSE_TEST_HOOKS
#include "select/hooks.hpp"

#include <pybind11/stl.h>

#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

#include "arguments.hpp"
#include "binding.hpp"
#include "select/sample.hpp"

namespace hvs {
namespace {

std::optional<hooks::Forced> plan;
std::atomic<std::size_t> fallback_count{0};

void py_force(const std::optional<std::tuple<double, double, double, std::size_t>>& given) {
  plan.reset();
  if (!given) return;
  const auto [low, guess, high, capacity] = *given;
  if (magnitude(low) > magnitude(guess)) refuse("low must not be above guess");
  plan = hooks::Forced{low, guess, high, capacity};
}

py::array_t<std::int64_t> py_sample_positions(std::size_t active) {
  std::vector<std::int64_t> positions;
  for (std::size_t j = 0; j < cluster_count(active); ++j) {
    for (std::size_t i = 0; i < cluster; ++i) positions.push_back(std::int64_t(cluster_begin(j, active) + i));
  }
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(positions.size()), positions.data());
}

}  // namespace

const hooks::Forced* hooks::forced() { return plan ? &*plan : nullptr; }

void hooks::count_fallback() { ++fallback_count; }

void define_hooks(py::module_& m) {
  m.def("force", py_force, "Uses (low, guess, high, capacity) instead of a sampled plan; None ends it.");
  m.def("fallbacks", [] { return fallback_count.load(); }, "Counts the wrong plans that led to radix selection.");
  m.def("sample_positions", py_sample_positions, "Lists which of `active` positions select samples.");
}

}  // namespace hvs
#endif
