#include "binding_memories.hpp"

#include <cmath>
#include <string>
#include <type_traits>

#include "arguments.hpp"
#include "quantize.hpp"
#include "sketch.hpp"

namespace hvs {
namespace {

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

Geometry as_geometry(std::int64_t size, std::int64_t rows) {
  if (rows != 1 && rows != 3 && rows != 5) refuse("rows must be 1, 3 or 5, not " + std::to_string(rows));
  return {as_size(size), std::size_t(rows), 0};
}

// The geometry of a sketch with this many counters.
Geometry as_geometry(const py::array& sketch, std::int64_t size, std::int64_t rows, Access access) {
  Geometry geometry = as_geometry(size, rows);
  check_plain(sketch, access, "sketch");
  const auto length = std::size_t(sketch.shape(0));
  geometry.groups = length / (lanes * geometry.rows);
  const bool fits = geometry.groups >= geometry.sections() && geometry.groups <= geometry.most_groups();
  if (geometry.length() != length || !fits) {
    refuse("sketch: " + std::to_string(length) + " counters do not fit a bucket of " + std::to_string(size) + " in " +
           std::to_string(rows) + " rows; use sketch_length");
  }
  return geometry;
}

std::size_t py_sketch_length(std::int64_t size, double ratio, std::int64_t rows) {
  Geometry geometry = as_geometry(size, rows);
  if (!(ratio > 0 && ratio <= 1)) refuse("ratio must be above 0 and at most 1, not " + std::to_string(ratio));
  const double groups = ratio * double(size) / double(lanes * geometry.rows);
  geometry.groups = std::max(geometry.sections(), std::size_t(groups));
  return geometry.length();
}

// The sketch and the buffer of a call, which have one dtype; `call` gets both, and the geometry.
template <class Call>
void with_sketch(py::handle counters, Access counters_access, py::handle elements, Access elements_access,
                 std::int64_t rows, const Call& call) {
  const py::array buffer = as_array(elements, "buffer"), sketch = as_array(counters, "sketch");
  with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, elements_access, "buffer");
    if (format_of(sketch, "sketch") != format_of(buffer, "buffer")) {
      refuse("sketch: dtype " + text(sketch.dtype()) + " is not that of the buffer, " + text(buffer.dtype()));
    }
    const Geometry geometry = as_geometry(sketch, buffer.shape(0), rows, counters_access);
    call(reinterpret_cast<Real*>(data_of(sketch)), reinterpret_cast<Real*>(data_of(buffer)), geometry);
  });
}

void py_sketch_update(py::handle counters, py::handle elements, py::handle positions, std::int64_t rows,
                      std::int64_t seed, double carried) {
  with_sketch(counters, Access::write, elements, Access::read, rows, [&](auto* sketch, auto* buffer, auto geometry) {
    using Real = std::remove_pointer_t<decltype(sketch)>;
    const std::int32_t* const delivered = as_indices(positions, "delivered");
    const Change<Real> change = {buffer, delivered, py::len(positions), Real(as_factor(carried, "carried"))};
    const std::uint64_t key = as_seed(seed);
    const py::gil_scoped_release release;
    check_ascending(delivered, change.count, geometry.size, "delivered");
    sketch_update(change, geometry, key, sketch);
  });
}

void py_sketch_query(py::handle counters, py::handle elements, std::int64_t rows, std::int64_t seed, double scale,
                     bool add) {
  with_sketch(counters, Access::read, elements, Access::write, rows, [&](auto* sketch, auto* buffer, auto geometry) {
    using Real = std::remove_pointer_t<decltype(sketch)>;
    const std::uint64_t key = as_seed(seed);
    const auto by = Real(as_factor(scale, "scale"));
    const py::gil_scoped_release release;
    sketch_query<Real>(sketch, geometry, key, by, add, buffer);
  });
}

int as_bits(std::int64_t bits) {
  if (bits != 4 && bits != 8) refuse("bits must be 4 or 8, not " + std::to_string(bits));
  return int(bits);
}

py::tuple py_quantize(py::handle object, std::int64_t bits, std::int64_t seed) {
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::read, "buffer");
    const int width = as_bits(bits);
    const std::uint64_t key = as_seed(seed);
    const auto size = std::size_t(buffer.shape(0));
    py::array_t<std::uint8_t> codes(static_cast<py::ssize_t>(code_bytes(size, width)));
    py::array_t<float> units(static_cast<py::ssize_t>(quantized_blocks(size)));
    const auto* const from = reinterpret_cast<const Real*>(data_of(buffer));
    std::uint8_t* const to_codes = codes.mutable_data();
    float* const to_units = units.mutable_data();
    {
      const py::gil_scoped_release release;
      quantize(from, size, width, key, to_codes, to_units);
    }
    return py::make_tuple(std::move(codes), std::move(units));
  });
}

// The data of a flat array that has this dtype and length.
template <class T> const T* checked_data(py::handle object, std::size_t length, const std::string& name) {
  const py::array array = as_array(object, name);
  if (!py::isinstance<py::array_t<T>>(array) || array.dtype().byteorder() == '>') {
    refuse(name + ": dtype " + text(array.dtype()) + " is not " + text(py::dtype::of<T>()));
  }
  check_plain(array, Access::read, name);
  if (std::size_t(array.shape(0)) != length) {
    refuse(name + ": has " + std::to_string(array.shape(0)) + " elements, but the buffer needs " +
           std::to_string(length));
  }
  return static_cast<const T*>(array.data());
}

void py_dequantize(py::handle codes, py::handle units, py::handle object, std::int64_t bits, double scale,
                   bool add) {
  const py::array buffer = as_array(object, "buffer");
  with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::write, "buffer");
    const int width = as_bits(bits);
    const auto size = std::size_t(buffer.shape(0));
    const auto* const from = checked_data<std::uint8_t>(codes, code_bytes(size, width), "codes");
    const auto* const by_block = checked_data<float>(units, quantized_blocks(size), "units");
    const auto by = Real(as_factor(scale, "scale"));
    auto* const out = reinterpret_cast<Real*>(data_of(buffer));
    const py::gil_scoped_release release;
    dequantize(from, by_block, size, width, by, add, out);
  });
}

}  // namespace

void define_memories(py::module_& m) {
  m.def("sketch_length", py_sketch_length);
  m.def("sketch_update", py_sketch_update);
  m.def("sketch_query", py_sketch_query);
  m.def("quantize", py_quantize);
  m.def("dequantize", py_dequantize);
}

}  // namespace hvs
