#include "binding.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "select/select.hpp"
#include "workspace.hpp"

namespace hvs {
namespace {

void py_accumulate(const py::sequence& segments, py::handle object, double scale, std::int64_t threads,
                   py::handle source, bool clear, py::handle velocity) {
  const py::array buffer = as_array(object, "buffer");
  with_real(buffer, "buffer", [&](auto real) {
    const auto step = as_step<decltype(real)>(segments, buffer, scale, source, clear, velocity);
    const std::size_t count = as_threads(threads);
    const py::gil_scoped_release release;
    accumulate(step, count);
  });
}

py::tuple py_select(const py::sequence& segments, py::handle object, std::int64_t k, double scale,
                    std::int64_t threads, py::handle source, bool clear, py::handle velocity) {
  if (k < 0) refuse("k must not be negative, but is " + std::to_string(k));
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::tuple {
    using Real = decltype(real);
    const auto step = as_step<Real>(segments, buffer, scale, source, clear, velocity);
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
                          std::int64_t threads, py::handle source, bool clear, py::handle velocity) {
  if (!(threshold >= 0)) refuse("threshold must be 0 or more, not " + std::to_string(threshold));
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::tuple {
    using Real = decltype(real);
    const auto step = as_step<Real>(segments, buffer, scale, source, clear, velocity);
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

}  // namespace

void define_select(py::module_& m) {
  m.def("accumulate", py_accumulate, py::arg("gradients"), py::arg("buffer"), py::arg("scale") = 1.0,
        py::arg("threads") = 1, py::kw_only(), py::arg("source") = py::none(), py::arg("clear") = false,
        py::arg("velocity") = py::none());
  m.def("select", py_select, py::arg("gradients"), py::arg("buffer"), py::arg("k"), py::arg("scale") = 1.0,
        py::arg("threads") = 1, py::kw_only(), py::arg("source") = py::none(), py::arg("clear") = false,
        py::arg("velocity") = py::none());
  m.def("select_above", py_select_above, py::arg("gradients"), py::arg("buffer"), py::arg("threshold"),
        py::arg("scale") = 1.0, py::arg("threads") = 1, py::kw_only(), py::arg("source") = py::none(),
        py::arg("clear") = false, py::arg("velocity") = py::none());
  m.def("cut", py_cut, py::arg("indices"), py::arg("values"), py::arg("k"));
  m.def("take", py_take, py::arg("gradients"), py::arg("buffer"), py::arg("positions"));
}

}  // namespace hvs
