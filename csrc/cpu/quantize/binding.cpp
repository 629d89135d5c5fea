#include "binding.hpp"

#include <string>
#include <type_traits>

#include "arguments.hpp"
#include "quantize/quantize.hpp"

namespace hvs {
namespace {

// Calls work with the number of bits as a constant.
template <class Work> auto with_bits(std::int64_t bits, const Work& work) {
  switch (bits) {
    case 4: return work(std::integral_constant<int, 4>{});
    case 8: return work(std::integral_constant<int, 8>{});
    case 16: return work(std::integral_constant<int, 16>{});
    default: refuse("bits must be 4, 8 or 16, not " + std::to_string(bits));
  }
}

py::tuple py_quantize(py::handle object, std::int64_t bits, std::int64_t seed) {
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::read, "buffer");
    return with_bits(bits, [&](auto width) -> py::tuple {
      const std::uint64_t key = as_seed(seed);
      const auto size = std::size_t(buffer.shape(0));
      py::array_t<Code<width>> codes(static_cast<py::ssize_t>(code_count(size, width)));
      py::array_t<float> units(static_cast<py::ssize_t>(quantized_blocks(size)));
      const auto* const from = reinterpret_cast<const Real*>(data_of(buffer));
      auto* const to_codes = codes.mutable_data();
      float* const to_units = units.mutable_data();
      {
        const py::gil_scoped_release release;
        quantize<width>(from, size, key, to_codes, to_units);
      }
      return py::make_tuple(std::move(codes), std::move(units));
    });
  });
}

// Checks that an array is flat and has this dtype and length; returns its data.
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
    with_bits(bits, [&](auto width) {
      const auto size = std::size_t(buffer.shape(0));
      const auto* const from = checked_data<Code<width>>(codes, code_count(size, width), "codes");
      const auto* const by_block = checked_data<float>(units, quantized_blocks(size), "units");
      const auto by = Real(as_factor(scale, "scale"));
      auto* const out = reinterpret_cast<Real*>(data_of(buffer));
      const py::gil_scoped_release release;
      dequantize<width>(from, by_block, size, by, add, out);
    });
  });
}

}  // namespace

void define_quantize(py::module_& m) {
  m.def("quantize", py_quantize, py::arg("buffer"), py::arg("bits"), py::arg("seed"));
  m.def("dequantize", py_dequantize, py::arg("codes"), py::arg("units"), py::arg("buffer"), py::arg("bits"),
        py::arg("scale") = 1.0, py::kw_only(), py::arg("add") = false);
}

}  // namespace hvs
