#include "binding.hpp"

#include <algorithm>
#include <string>
#include <type_traits>

#include "arguments.hpp"
#include "sketch/sketch.hpp"

namespace hvs {
namespace {

Geometry as_geometry(std::int64_t size, std::int64_t rows) {
  if (rows != 1 && rows != 3 && rows != 5) refuse("rows must be 1, 3 or 5, not " + std::to_string(rows));
  return {as_size(size), std::size_t(rows), 0};
}

// The geometry of the sketch; its number of counters must be valid for the bucket.
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

// Checks the sketch and the buffer, which must have the same dtype, and passes them and the geometry to `call`.
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

}  // namespace

void define_sketch(py::module_& m) {
  m.def("sketch_length", py_sketch_length, py::arg("size"), py::arg("ratio"), py::arg("rows"));
  m.def("sketch_update", py_sketch_update, py::arg("sketch"), py::arg("buffer"), py::arg("delivered"), py::arg("rows"),
        py::arg("seed"), py::arg("carried") = 0.0);
  m.def("sketch_query", py_sketch_query, py::arg("sketch"), py::arg("buffer"), py::arg("rows"), py::arg("seed"),
        py::arg("scale") = 1.0, py::kw_only(), py::arg("add") = false);
}

}  // namespace hvs
