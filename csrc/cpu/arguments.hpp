// Checks Python arguments and converts them to C++. Only this file, its source and the bindings use Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "gradient.hpp"
#include "sparse.hpp"

namespace hvs {

namespace py = pybind11;

constexpr std::size_t largest_size = std::numeric_limits<std::int32_t>::max();
enum class Access { read, write };

// Throws std::invalid_argument, which becomes ValueError in Python.
[[noreturn]] void refuse(const std::string& message);

std::string text(py::handle object);

py::array as_array(py::handle object, const std::string& name);

void check_size(std::size_t size, const std::string& name);

// Refuses arrays that cannot be used in place. Vectors and buffers must pass this; gradients need not.
void check_plain(const py::array& array, Access access, const std::string& name);

Format format_of(const py::array& array, const std::string& name);

inline char* data_of(const py::array& array) { return static_cast<char*>(const_cast<void*>(array.data())); }

std::vector<Tensor> as_tensors(const py::sequence& segments, std::size_t size);

// Refuses segments that cannot be written in place. They must have passed as_tensors.
void check_outputs(const py::sequence& segments);

std::size_t as_threads(std::int64_t threads);

std::size_t as_size(std::int64_t size);

std::uint64_t as_seed(std::int64_t seed);

double as_factor(double factor, const char* name);

const std::int32_t* as_indices(py::handle object, const std::string& name);

// Calls work with a float or a double, according to the array's dtype.
template <class Work> auto with_real(const py::array& array, const std::string& name, const Work& work) {
  switch (format_of(array, name)) {
    case Format::float32: return work(float());
    case Format::float64: return work(double());
    default: refuse(name + ": dtype " + text(array.dtype()) + " is neither float32 nor float64");
  }
}

template <class Real>
Step<Real> as_step(const py::sequence& segments, const py::array& buffer, double scale, Access access = Access::write) {
  if (!std::isfinite(scale)) refuse("scale must be finite, not " + std::to_string(scale));
  check_plain(buffer, access, "buffer");
  const auto size = std::size_t(buffer.shape(0));
  auto* const elements = reinterpret_cast<Real*>(data_of(buffer));
  return {elements, elements, size, Real(scale), as_tensors(segments, size)};
}

// An array of the same size and dtype as the buffer.
inline py::array as_beside(py::handle object, const py::array& buffer, Access access, const std::string& name) {
  const py::array array = as_array(object, name);
  check_plain(array, access, name);
  if (format_of(array, name) != format_of(buffer, "buffer") || array.shape(0) != buffer.shape(0)) {
    refuse(name + ": " + std::to_string(array.shape(0)) + " elements of " + text(array.dtype()) +
           ", but the buffer has " + std::to_string(buffer.shape(0)) + " of " + text(buffer.dtype()));
  }
  return array;
}

// Converts None or (values, momentum, share, fresh, weight).
template <class Real> Velocity<Real> as_velocity(py::handle object, const py::array& buffer) {
  if (object.is_none()) return {};
  const auto [values, momentum, share, fresh, weight] =
      object.cast<std::tuple<py::object, double, double, double, double>>();
  const py::array array = as_beside(values, buffer, Access::write, "velocity");
  return {reinterpret_cast<Real*>(data_of(array)), Real(as_factor(momentum, "momentum")),
          Real(as_factor(share, "share")), Real(as_factor(fresh, "fresh")), Real(as_factor(weight, "weight"))};
}

// as_step with a source array (None: the buffer), gradients that are set to zero if `clear`, and a velocity.
template <class Real>
Step<Real> as_step(const py::sequence& segments, const py::array& buffer, double scale, py::handle source, bool clear,
                   py::handle velocity) {
  Step<Real> step = as_step<Real>(segments, buffer, scale);
  if (!source.is_none()) {
    step.source = static_cast<const Real*>(as_beside(source, buffer, Access::read, "source").data());
  }
  if (clear) check_outputs(segments);
  step.clear = clear;
  step.velocity = as_velocity<Real>(velocity, buffer);
  return step;
}

// If indices is None, the values cover all positions.
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

// A sparse vector that is returned to Python.
template <class Real> class Output {
 public:
  explicit Output(std::size_t room)
      : indices_(static_cast<py::ssize_t>(room)), values_(static_cast<py::ssize_t>(room)) {}

  std::int32_t* indices() { return indices_.mutable_data(); }
  Real* values() { return values_.mutable_data(); }

  // Returns the first `count` entries; releases the memory after them in place.
  py::tuple first(std::size_t count) {
    indices_.resize({static_cast<py::ssize_t>(count)}, false);
    values_.resize({static_cast<py::ssize_t>(count)}, false);
    return py::make_tuple(std::move(indices_), std::move(values_));
  }

 private:
  py::array_t<std::int32_t> indices_;
  py::array_t<Real> values_;
};

}  // namespace hvs
