// The only file that knows Python: arguments are checked here, the work is done without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "finite.hpp"
#include "level.hpp"
#include "sample.hpp"
#include "select.hpp"
#include "sparse.hpp"

namespace py = pybind11;

namespace hvs {
namespace {

constexpr int numpy_half = 23;  // NPY_HALF, which pybind11 does not name
constexpr std::size_t largest_size = std::numeric_limits<std::int32_t>::max();
enum class Access { read, write };

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string text(py::handle object) { return py::str(object); }

py::array as_array(py::handle object, const std::string& name) {
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(name + ": expected a NumPy array, not " + text(py::type::of(object)));
  }
  return py::reinterpret_borrow<py::array>(object);
}

void check_size(std::size_t size, const std::string& name) {
  if (size > largest_size) {
    refuse(name + ": " + std::to_string(size) + " elements, but indices are int32: use buckets of less than 2**31");
  }
}

void check_flat(const py::array& array, const std::string& name) {
  if (array.ndim() != 1) refuse(name + ": expected one dimension, not " + std::to_string(array.ndim()));
  check_size(std::size_t(array.shape(0)), name);
}

// Whether elements can be used in place; what a vector or a buffer must be, and a gradient need not.
void check_plain(const py::array& array, Access access, const std::string& name) {
  check_flat(array, name);
  if (array.shape(0) > 1 && array.strides(0) != array.itemsize()) refuse(name + ": must be contiguous");
  if (reinterpret_cast<std::uintptr_t>(array.data()) % std::size_t(array.itemsize()) != 0) {
    refuse(name + ": must be aligned to its elements");
  }
  if (access == Access::write && !array.writeable()) refuse(name + ": is read-only; pass a writable array");
}

// ml_dtypes registers bfloat16 at run time, so that its number is only known from its name.
bool is_bfloat16(const py::dtype& dtype) {
  static int number = -1;
  if (dtype.num() == number) return true;
  if (dtype.itemsize() != 2 || text(dtype.attr("name")) != "bfloat16") return false;
  number = dtype.num();
  return true;
}

Format format_of(const py::array& array, const std::string& name) {
  const py::dtype dtype = array.dtype();
  if (dtype.byteorder() == '=') {
    if (dtype.num() == py::detail::npy_api::NPY_FLOAT_) return Format::float32;
    if (dtype.num() == py::detail::npy_api::NPY_DOUBLE_) return Format::float64;
    if (dtype.num() == numpy_half) return Format::float16;
    if (is_bfloat16(dtype)) return Format::bfloat16;
  }
  refuse(name + ": dtype " + text(dtype) + " is not float32, float16, bfloat16 (ml_dtypes) or float64 in native order");
}

char* data_of(const py::array& array) { return static_cast<char*>(const_cast<void*>(array.data())); }

Tensor as_tensor(py::handle pair, std::size_t least, const std::string& name) {
  if (!py::isinstance<py::tuple>(pair) || py::len(pair) != 2) {
    refuse(name + ": expected (start, array), not " + text(pair));
  }
  const auto items = py::reinterpret_borrow<py::tuple>(pair);
  const py::ssize_t start = PyNumber_AsSsize_t(items[0].ptr(), PyExc_OverflowError);
  if (start == -1 && PyErr_Occurred()) throw py::error_already_set();
  const py::array array = as_array(items[1], name);
  check_flat(array, name);
  if (start < py::ssize_t(least)) {
    refuse(name + ": starts at " + std::to_string(start) + ", before " + std::to_string(least) +
           ", where the one before it ends; segments must ascend and not overlap");
  }
  return {std::size_t(start), std::size_t(array.shape(0)), data_of(array), array.strides(0), format_of(array, name)};
}

std::vector<Tensor> as_tensors(const py::sequence& segments, std::size_t size) {
  std::vector<Tensor> tensors;
  tensors.reserve(segments.size());
  for (const py::handle pair : segments) {
    const std::string name = "segment " + std::to_string(tensors.size());
    tensors.push_back(as_tensor(pair, tensors.empty() ? 0 : tensors.back().stop(), name));
    if (tensors.back().stop() > size) {
      refuse(name + ": ends at " + std::to_string(tensors.back().stop()) + ", behind the last of " +
             std::to_string(size) + " positions");
    }
  }
  return tensors;
}

// Calls work with a float or a double, after the array's dtype.
template <class Work> auto with_real(const py::array& array, const std::string& name, const Work& work) {
  switch (format_of(array, name)) {
    case Format::float32: return work(float());
    case Format::float64: return work(double());
    default: refuse(name + ": dtype " + text(array.dtype()) + " is neither float32 nor float64");
  }
}

template <class Real> Step<Real> as_step(const py::sequence& segments, const py::array& buffer, double scale) {
  if (!std::isfinite(scale)) refuse("scale must be finite, not " + std::to_string(scale));
  check_plain(buffer, Access::write, "buffer");
  const auto size = std::size_t(buffer.shape(0));
  return {reinterpret_cast<Real*>(data_of(buffer)), size, Real(scale), as_tensors(segments, size)};
}

std::size_t as_threads(std::int64_t threads) {
  if (threads < 1 || threads > 1024) refuse("threads must be 1 .. 1024, not " + std::to_string(threads));
  return std::size_t(threads);
}

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
    py::array_t<std::int32_t> indices(static_cast<py::ssize_t>(taken));
    py::array_t<Real> values(static_cast<py::ssize_t>(taken));
    std::int32_t* const to_indices = indices.mutable_data();
    Real* const to_values = values.mutable_data();
    {
      const py::gil_scoped_release release;
      select(step, taken, count, to_indices, to_values);
    }
    return py::make_tuple(std::move(indices), std::move(values));
  });
}

bool py_all_finite(const py::sequence& segments) {
  const std::vector<Tensor> tensors = as_tensors(segments, largest_size);
  const py::gil_scoped_release release;
  return all_finite(tensors);
}

const std::int32_t* as_indices(py::handle object, const std::string& name) {
  const py::array array = as_array(object, name);
  if (!py::isinstance<py::array_t<std::int32_t>>(array) || array.dtype().byteorder() != '=') {
    refuse(name + ": dtype " + text(array.dtype()) + " is not int32");
  }
  check_plain(array, Access::read, name);
  return static_cast<const std::int32_t*>(array.data());
}

// indices None stands for all positions.
template <class Real> Sparse<Real> as_sparse(py::handle indices, py::handle object, const std::string& name) {
  const py::array values = as_array(object, name + ": values");
  check_plain(values, Access::read, name + ": values");
  if (!py::isinstance<py::array_t<Real>>(values) || values.dtype().byteorder() != '=') {
    refuse(name + ": dtype " + text(values.dtype()) + " of the values is not " + text(py::dtype::of<Real>()));
  }
  const auto count = std::size_t(values.shape(0));
  if (indices.is_none()) return {nullptr, static_cast<const Real*>(values.data()), count};
  const std::int32_t* const at = as_indices(indices, name + ": indices");
  if (py::len(indices) != count) {
    refuse(name + ": " + std::to_string(py::len(indices)) + " indices, but " + std::to_string(count) + " values");
  }
  return {at, static_cast<const Real*>(values.data()), count};
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
  py::array_t<std::int32_t> indices(static_cast<py::ssize_t>(room));
  py::array_t<Real> values(static_cast<py::ssize_t>(room));
  std::int32_t* const to_indices = indices.mutable_data();
  Real* const to_values = values.mutable_data();
  {
    const py::gil_scoped_release release;
    for (std::size_t v = 0; v < vectors.size(); ++v) {
      check_ascending(vectors[v].indices, vectors[v].count, size, ("vector " + std::to_string(v)).c_str());
    }
    count = merge_sum(vectors, size, to_indices, to_values);
  }
  // Gives the memory behind the union back, in place.
  indices.resize({static_cast<py::ssize_t>(count)}, false);
  values.resize({static_cast<py::ssize_t>(count)}, false);
  return py::make_tuple(std::move(indices), std::move(values));
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
  m.def("all_finite", hvs::py_all_finite);
  m.def("merge_sum", hvs::py_merge_sum);
  m.def("scatter", hvs::py_scatter);
  m.def("add", hvs::py_add);
  m.def("simd_level", hvs::simd_level);
  m.def("use_simd", hvs::use_simd);
  m.def("force", hvs::py_force, "For tests: (low, guess, high, capacity) instead of a sampled plan; None ends it.");
  m.def("fallbacks", hvs::fallbacks, "For tests: how often a wrong plan led to radix selection.");
  m.def("sample_positions", hvs::py_sample_positions, "For tests: which of `active` positions select samples.");
}
