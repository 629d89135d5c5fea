#include "binding.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "histogram.hpp"
#include "vectors/vectors.hpp"

namespace hvs {
namespace {

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

// The entries of a vector that `remain(vector, indices, values)` copies; it returns their number.
template <class Remain> py::tuple remaining(py::handle indices, py::handle object, Remain&& remain) {
  if (indices.is_none()) refuse("vector: has no indices; pass a sparse vector");
  const py::array values = as_array(object, "vector: values");
  return with_real(values, "vector: values", [&](auto real) {
    using Real = decltype(real);
    const auto vector = as_sparse<Real>(indices, values, "vector");
    Output<Real> output(vector.count);
    std::size_t kept = 0;
    {
      const py::gil_scoped_release release;
      check_ascending(vector.indices, vector.count, largest_size, "vector");
      kept = remain(vector, output.indices(), output.values());
    }
    return output.first(kept);
  });
}

py::tuple py_exclude(py::handle indices, py::handle values, py::handle others) {
  const std::int32_t* const excluded = as_indices(others, "others");
  const std::size_t count = py::len(others);
  return remaining(indices, values, [&](const auto& vector, std::int32_t* positions, auto* kept) {
    check_ascending(excluded, count, largest_size, "others");
    return exclude(vector, excluded, count, positions, kept);
  });
}

py::tuple py_reaching(py::handle indices, py::handle values, double threshold) {
  if (!(threshold >= 0)) refuse("threshold must be 0 or more, not " + std::to_string(threshold));
  return remaining(indices, values, [&](const auto& vector, std::int32_t* positions, auto* kept) {
    return reaching(vector, threshold, positions, kept);
  });
}

py::array py_gathered(py::handle object, py::handle positions, double factor) {
  const py::array buffer = as_array(object, "buffer");
  check_plain(buffer, Access::read, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::array {
    using Real = decltype(real);
    const auto* const from = reinterpret_cast<const Real*>(data_of(buffer));
    const std::int32_t* const at = as_indices(positions, "positions");
    const std::size_t count = py::len(positions), size = std::size_t(buffer.shape(0));
    py::array_t<Real> values((py::ssize_t(count)));
    Real* const out = values.mutable_data();
    {
      const py::gil_scoped_release release;
      check_ascending(at, count, size, "positions");
      for (std::size_t i = 0; i < count; ++i) out[i] = Real(factor) * from[at[i]];
    }
    return std::move(values);
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

void py_scatter(py::handle indices, py::handle object, const py::sequence& segments, double scale, bool cleared) {
  const py::array values = as_array(object, "values");
  with_real(values, "values", [&](auto real) {
    using Real = decltype(real);
    const auto vector = as_sparse<Real>(indices, values, "vector");
    const std::vector<Tensor> outputs = as_tensors(segments, vector.indices ? largest_size : vector.count);
    check_outputs(segments);
    const py::gil_scoped_release release;
    if (vector.indices) check_ascending(vector.indices, vector.count, largest_size, "vector");
    scatter(vector, outputs, Real(scale), cleared);
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

// Calls work with a number of the 16-bit format.
template <class Work> void with_format(bool bfloat16, const Work& work) {
  bfloat16 ? work(BFloat16{}) : work(Half{});
}

using Floats = py::array_t<float, py::array::c_style>;
using Words = py::array_t<std::uint16_t, py::array::c_style>;

void py_narrow(const Floats& values, Words& out, bool bfloat16) {
  const float* const from = values.data();
  const auto count = std::size_t(values.size());
  std::uint16_t* const to = out.mutable_data();
  const py::gil_scoped_release release;
  with_format(bfloat16, [&](auto format) { narrow(from, count, reinterpret_cast<decltype(format)*>(to)); });
}

void py_widen(const Words& words, Floats& out, bool bfloat16) {
  const std::uint16_t* const from = words.data();
  const auto count = std::size_t(words.size());
  float* const to = out.mutable_data();
  const py::gil_scoped_release release;
  with_format(bfloat16, [&](auto format) { widen_all(reinterpret_cast<const decltype(format)*>(from), count, to); });
}

void py_round_values(const Floats& values, Floats& rounded, Floats& error, bool bfloat16) {
  const float* const from = values.data();
  const auto count = std::size_t(values.size());
  float *const near = rounded.mutable_data(), *const left = error.mutable_data();
  const py::gil_scoped_release release;
  with_format(bfloat16, [&](auto format) { round_values<decltype(format)>(from, count, near, left); });
}

}  // namespace

void define_vectors(py::module_& m) {
  m.def("narrow", py_narrow, py::arg("values").noconvert(), py::arg("out").noconvert(), py::arg("bfloat16"));
  m.def("widen", py_widen, py::arg("words").noconvert(), py::arg("out").noconvert(), py::arg("bfloat16"));
  m.def("round_values", py_round_values, py::arg("values").noconvert(), py::arg("rounded").noconvert(),
        py::arg("error").noconvert(), py::arg("bfloat16"));
  m.def("merge_sum", py_merge_sum, py::arg("vectors"), py::arg("size"));
  m.def("gathered", py_gathered, py::arg("buffer"), py::arg("positions"), py::arg("factor"));
  m.def("exclude", py_exclude, py::arg("indices"), py::arg("values"), py::arg("others"));
  m.def("reaching", py_reaching, py::arg("indices"), py::arg("values"), py::arg("threshold"));
  m.def("count_magnitudes", py_count_magnitudes, py::arg("values"), py::arg("prefix"), py::arg("shift"),
        py::arg("bits"));
  m.def("scatter", py_scatter, py::arg("indices"), py::arg("values"), py::arg("outputs"), py::arg("scale") = 1.0,
        py::kw_only(), py::arg("cleared") = false);
  m.def("add", py_add, py::arg("indices"), py::arg("values"), py::arg("buffer"));
}

}  // namespace hvs
