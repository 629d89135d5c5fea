// The functions of the module: arguments are checked, then the work is done without the GIL.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "above.hpp"
#include "arguments.hpp"
#include "binding_memories.hpp"
#include "binding_moments.hpp"
#include "finite.hpp"
#include "histogram.hpp"
#include "level.hpp"
#include "sample.hpp"
#include "select.hpp"
#include "sparse.hpp"
#include "take.hpp"

namespace hvs {
namespace {

// A sparse vector to return.
template <class Real> class Output {
 public:
  explicit Output(std::size_t room)
      : indices_(static_cast<py::ssize_t>(room)), values_(static_cast<py::ssize_t>(room)) {}

  std::int32_t* indices() { return indices_.mutable_data(); }
  Real* values() { return values_.mutable_data(); }

  // Its first `count` entries; gives the memory behind them back, in place.
  py::tuple first(std::size_t count) {
    indices_.resize({static_cast<py::ssize_t>(count)}, false);
    values_.resize({static_cast<py::ssize_t>(count)}, false);
    return py::make_tuple(std::move(indices_), std::move(values_));
  }

 private:
  py::array_t<std::int32_t> indices_;
  py::array_t<Real> values_;
};

void py_accumulate(const py::sequence& segments, py::handle object, double scale, std::int64_t threads) {
  const py::array buffer = as_array(object, "buffer");
  with_real(buffer, "buffer", [&](auto real) {
    const auto step = as_step<decltype(real)>(segments, buffer, scale);
    const std::size_t count = as_threads(threads);
    const py::gil_scoped_release release;
    accumulate(step, count);
  });
}

py::tuple py_select(const py::sequence& segments, py::handle object, std::int64_t k, double scale,
                    std::int64_t threads) {
  if (k < 0) refuse("k must not be negative, but is " + std::to_string(k));
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::tuple {
    using Real = decltype(real);
    const auto step = as_step<Real>(segments, buffer, scale);
    const std::size_t count = as_threads(threads), taken = std::min(std::size_t(k), step.active());
    Output<Real> output(taken);
    {
      const py::gil_scoped_release release;
      select(step, taken, count, output.indices(), output.values());
    }
    return output.first(taken);
  });
}

template <class Real> py::tuple join(const std::vector<Entries<Real>>& pieces) {
  std::size_t count = 0;
  for (const Entries<Real>& piece : pieces) count += piece.count;
  Output<Real> output(count);
  {
    const py::gil_scoped_release release;
    std::size_t at = 0;
    for (const Entries<Real>& piece : pieces) {
      std::copy_n(piece.indices, piece.count, output.indices() + at);
      std::copy_n(piece.values, piece.count, output.values() + at);
      at += piece.count;
    }
  }
  return output.first(count);
}

py::tuple py_select_above(const py::sequence& segments, py::handle object, double threshold, double scale,
                          std::int64_t threads) {
  if (!(threshold >= 0)) refuse("threshold must be 0 or more, not " + std::to_string(threshold));
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::tuple {
    using Real = decltype(real);
    const auto step = as_step<Real>(segments, buffer, scale);
    const std::size_t count = as_threads(threads);
    Lease scratch(workspaces());
    std::vector<Entries<Real>> taken;
    {
      const py::gil_scoped_release release;
      taken = take_above(step, magnitude(Real(threshold)), count, *scratch);
    }
    try {
      return join(taken);
    } catch (...) {  // out of memory
      put_back(taken, step.buffer);
      throw;
    }
  });
}

bool py_all_finite(const py::sequence& segments) {
  const std::vector<Tensor> tensors = as_tensors(segments, largest_size);
  const py::gil_scoped_release release;
  return all_finite(tensors);
}

template <class Real> std::vector<Sparse<Real>> as_vectors(const std::vector<py::tuple>& pairs) {
  std::vector<Sparse<Real>> vectors;
  for (const py::tuple& pair : pairs) {
    const std::string name = "vector " + std::to_string(vectors.size());
    if (pair[0].is_none()) refuse(name + ": has no indices; dense vectors are added as arrays");
    vectors.push_back(as_sparse<Real>(pair[0], pair[1], name));
  }
  return vectors;
}

template <class Real> py::tuple merge(const std::vector<py::tuple>& pairs, std::size_t size) {
  const std::vector<Sparse<Real>> vectors = as_vectors<Real>(pairs);
  std::size_t room = 0, count = 0;
  for (const Sparse<Real>& vector : vectors) room += vector.count;
  room = std::min(room, size);
  Output<Real> output(room + padding);
  {
    const py::gil_scoped_release release;
    for (std::size_t v = 0; v < vectors.size(); ++v) {
      check_ascending(vectors[v].indices, vectors[v].count, size, ("vector " + std::to_string(v)).c_str());
    }
    count = merge_sum(vectors, size, room, output.indices(), output.values());
  }
  return output.first(count);
}

py::tuple py_merge_sum(const py::sequence& vectors, std::int64_t size) {
  if (size < 0) refuse("size must not be negative, but is " + std::to_string(size));
  check_size(std::size_t(size), "size");
  std::vector<py::tuple> pairs;
  for (const py::handle pair : vectors) {
    if (!py::isinstance<py::tuple>(pair) || py::len(pair) != 2) refuse("expected (indices, values), not " + text(pair));
    pairs.push_back(py::reinterpret_borrow<py::tuple>(pair));
  }
  if (pairs.empty()) refuse("merge_sum needs at least one vector: the dtype of the sum is that of the first");
  return with_real(as_array(pairs[0][1], "vector 0: values"), "vector 0: values",
                   [&](auto real) { return merge<decltype(real)>(pairs, std::size_t(size)); });
}

py::tuple py_exclude(py::handle indices, py::handle object, py::handle others) {
  if (indices.is_none()) refuse("vector: has no indices; pass a sparse vector");
  const py::array values = as_array(object, "vector: values");
  return with_real(values, "vector: values", [&](auto real) {
    using Real = decltype(real);
    const auto vector = as_sparse<Real>(indices, values, "vector");
    const std::int32_t* const excluded = as_indices(others, "others");
    const std::size_t count = py::len(others);
    Output<Real> output(vector.count);
    std::size_t kept = 0;
    {
      const py::gil_scoped_release release;
      check_ascending(vector.indices, vector.count, largest_size, "vector");
      check_ascending(excluded, count, largest_size, "others");
      kept = exclude(vector, excluded, count, output.indices(), output.values());
    }
    return output.first(kept);
  });
}

py::tuple py_cut(py::handle indices, py::handle object, std::int64_t k) {
  if (k < 0) refuse("k must not be negative, but is " + std::to_string(k));
  if (indices.is_none()) refuse("vector: has no indices; pass a sparse vector");
  const py::array values = as_array(object, "vector: values");
  return with_real(values, "vector: values", [&](auto real) {
    using Real = decltype(real);
    const auto vector = as_sparse<Real>(indices, values, "vector");
    const std::size_t taken = std::min(std::size_t(k), vector.count), left = vector.count - taken;
    Output<Real> largest(taken + 1), rest(left + 1);
    Entries<Real> to_largest = {largest.indices(), largest.values(), 0}, to_rest = {rest.indices(), rest.values(), 0};
    {
      const py::gil_scoped_release release;
      cut(vector, taken, to_largest, to_rest);
    }
    return py::make_tuple(largest.first(taken), rest.first(left));
  });
}

template <class Real> Digit<Key<Real>> as_digit(std::int64_t prefix, std::int64_t shift, std::int64_t bits) {
  constexpr std::int64_t widest = 16, width = Bits<Real>::width;
  if (bits < 1 || bits > widest) refuse("bits must be 1 .. 16, not " + std::to_string(bits));
  if (shift < 0 || shift > width - bits) {
    refuse("shift must be 0 .. " + std::to_string(width - bits) + " for " + std::to_string(bits) + " of " +
           std::to_string(width) + " bits, not " + std::to_string(shift));
  }
  if (prefix < 0 || prefix > largest_key<Real>) {
    refuse("prefix must have at most " + std::to_string(width) + " bits, but is " + std::to_string(prefix));
  }
  return {Key<Real>(prefix), int(shift), int(bits)};
}

py::array_t<std::int64_t> py_count_magnitudes(py::handle object, std::int64_t prefix, std::int64_t shift,
                                              std::int64_t bits) {
  const py::array values = as_array(object, "values");
  check_plain(values, Access::read, "values");
  std::vector<std::int64_t> counts;
  with_real(values, "values", [&](auto real) {
    using Real = decltype(real);
    const Digit<Key<Real>> digit = as_digit<Real>(prefix, shift, bits);
    const auto* const x = reinterpret_cast<const Real*>(data_of(values));
    const auto size = std::size_t(values.shape(0));
    const py::gil_scoped_release release;
    Histogram<Real> histogram(digit);
    histogram.add(x, size);
    counts = histogram.totals();
  });
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(counts.size()), counts.data());
}

void check_output(py::handle pair, const std::string& name) {
  const auto array = py::reinterpret_borrow<py::array>(py::reinterpret_borrow<py::tuple>(pair)[1]);
  if (array.shape(0) > 1 && array.strides(0) != array.itemsize()) refuse(name + ": an output must be contiguous");
  if (!array.writeable()) refuse(name + ": an output must be writable");
}

void py_scatter(py::handle indices, py::handle object, const py::sequence& segments, double scale) {
  const py::array values = as_array(object, "values");
  with_real(values, "values", [&](auto real) {
    using Real = decltype(real);
    const auto vector = as_sparse<Real>(indices, values, "vector");
    const std::vector<Tensor> outputs = as_tensors(segments, vector.indices ? largest_size : vector.count);
    for (std::size_t i = 0; i < outputs.size(); ++i) check_output(segments[i], "segment " + std::to_string(i));
    const py::gil_scoped_release release;
    if (vector.indices) check_ascending(vector.indices, vector.count, largest_size, "vector");
    scatter(vector, outputs, Real(scale));
  });
}

void py_add(py::handle indices, py::handle values, py::handle object) {
  const py::array buffer = as_array(object, "buffer");
  with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::write, "buffer");
    const auto vector = as_sparse<Real>(indices, values, "vector");
    const auto size = std::size_t(buffer.shape(0));
    if (!vector.indices && vector.count != size) {
      refuse("vector: " + std::to_string(vector.count) + " values for all of " + std::to_string(size) + " positions");
    }
    auto* const to = reinterpret_cast<Real*>(data_of(buffer));
    const py::gil_scoped_release release;
    if (vector.indices) check_bounds(vector.indices, vector.count, size, "vector");
    add(vector, to);
  });
}

py::array py_take(const py::sequence& segments, py::handle object, py::handle positions) {
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::array {
    using Real = decltype(real);
    const Step<Real> step = as_step<Real>(segments, buffer, 1.0);
    const std::int32_t* const at = positions.is_none() ? nullptr : as_indices(positions, "positions");
    const std::size_t count = at ? py::len(positions) : step.size;
    py::array_t<Real> values((py::ssize_t(count)));
    Real* const out = values.mutable_data();
    {
      const py::gil_scoped_release release;
      if (at) check_ascending(at, count, step.size, "positions");
      take(step.gradients, at, count, step.buffer, out);
    }
    return std::move(values);
  });
}

void py_force(const std::optional<std::tuple<double, double, double, std::size_t>>& plan) {
  forced.reset();
  if (!plan) return;
  const auto [low, guess, high, capacity] = *plan;
  if (magnitude(low) > magnitude(guess)) refuse("low must not be above guess");
  forced = Forced{low, guess, high, capacity};
}

py::array_t<std::int64_t> py_sample_positions(std::size_t active) {
  std::vector<std::int64_t> positions;
  for (std::size_t j = 0; j < cluster_count(active); ++j) {
    for (std::size_t i = 0; i < cluster; ++i) positions.push_back(std::int64_t(cluster_begin(j, active) + i));
  }
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(positions.size()), positions.data());
}

}  // namespace
}  // namespace hvs

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "The kernels of horovod_sparse.kernels.cpu, where they are described.";
  m.def("accumulate", hvs::py_accumulate);
  m.def("select", hvs::py_select);
  m.def("select_above", hvs::py_select_above);
  m.def("all_finite", hvs::py_all_finite);
  m.def("merge_sum", hvs::py_merge_sum);
  m.def("exclude", hvs::py_exclude);
  m.def("cut", hvs::py_cut);
  m.def("count_magnitudes", hvs::py_count_magnitudes);
  hvs::define_moments(m);
  m.def("scatter", hvs::py_scatter);
  m.def("add", hvs::py_add);
  m.def("take", hvs::py_take);
  hvs::define_memories(m);
  m.def("simd_level", hvs::simd_level);
  m.def("use_simd", hvs::use_simd);
  m.def("force", hvs::py_force, "For tests: (low, guess, high, capacity) instead of a sampled plan; None ends it.");
  m.def("fallbacks", hvs::fallbacks, "For tests: how often a wrong plan led to radix selection.");
  m.def("sample_positions", hvs::py_sample_positions, "For tests: which of `active` positions select samples.");
}
