#include "arguments.hpp"

#include <stdexcept>

namespace hvs {
namespace {

constexpr int numpy_half = 23;  // NPY_HALF; pybind11 has no name for it

void check_flat(const py::array& array, const std::string& name) {
  if (array.ndim() != 1) refuse(name + ": expected one dimension, not " + std::to_string(array.ndim()));
  check_size(std::size_t(array.shape(0)), name);
}

// ml_dtypes registers bfloat16 at run time, so its type number is only known from its name.
bool is_bfloat16(const py::dtype& dtype) {
  static int number = -1;
  if (dtype.num() == number) return true;
  if (dtype.itemsize() != 2 || text(dtype.attr("name")) != "bfloat16") return false;
  number = dtype.num();
  return true;
}

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

}  // namespace

void refuse(const std::string& message) { throw std::invalid_argument(message); }

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

void check_plain(const py::array& array, Access access, const std::string& name) {
  check_flat(array, name);
  if (array.shape(0) > 1 && array.strides(0) != array.itemsize()) refuse(name + ": must be contiguous");
  if (reinterpret_cast<std::uintptr_t>(array.data()) % std::size_t(array.itemsize()) != 0) {
    refuse(name + ": must be aligned to its elements");
  }
  if (access == Access::write && !array.writeable()) refuse(name + ": is read-only; pass a writable array");
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

void check_outputs(const py::sequence& segments) {
  std::size_t number = 0;
  for (const py::handle pair : segments) {
    const std::string name = "segment " + std::to_string(number++);
    const auto array = py::reinterpret_borrow<py::array>(py::reinterpret_borrow<py::tuple>(pair)[1]);
    if (array.shape(0) > 1 && array.strides(0) != array.itemsize()) refuse(name + ": an output must be contiguous");
    if (!array.writeable()) refuse(name + ": an output must be writable");
  }
}

std::size_t as_threads(std::int64_t threads) {
  if (threads < 1 || threads > 1024) refuse("threads must be 1 .. 1024, not " + std::to_string(threads));
  return std::size_t(threads);
}

const std::int32_t* as_indices(py::handle object, const std::string& name) {
  const py::array array = as_array(object, name);
  if (!py::isinstance<py::array_t<std::int32_t>>(array) || array.dtype().byteorder() != '=') {
    refuse(name + ": dtype " + text(array.dtype()) + " is not int32");
  }
  check_plain(array, Access::read, name);
  return static_cast<const std::int32_t*>(array.data());
}

std::size_t as_size(std::int64_t size) {
  if (size < 0) refuse("size must not be negative, but is " + std::to_string(size));
  check_size(std::size_t(size), "size");
  return std::size_t(size);
}

std::uint64_t as_seed(std::int64_t seed) {
  if (seed < 0) refuse("seed must not be negative, but is " + std::to_string(seed));
  return std::uint64_t(seed);
}

double as_factor(double factor, const char* name) {
  if (!std::isfinite(factor)) refuse(std::string(name) + " must be finite, not " + std::to_string(factor));
  return factor;
}

}  // namespace hvs
