#include "binding.hpp"

#include <algorithm>
#include <string>
#include <type_traits>

#include "arguments.hpp"
#include "coding/coding.hpp"
#include "sparse.hpp"

namespace hvs {
namespace {

using Bytes = py::array_t<std::uint8_t>;

std::int64_t in_range(std::int64_t number, std::int64_t least, std::int64_t most, const char* name) {
  if (number < least || number > most) {
    refuse(std::string(name) + " must be " + std::to_string(least) + " .. " + std::to_string(most) + ", not " +
           std::to_string(number));
  }
  return number;
}

const std::uint8_t* as_bytes(py::handle object, const std::string& name) {
  const py::array array = as_array(object, name);
  if (!py::isinstance<Bytes>(array)) refuse(name + ": dtype " + text(array.dtype()) + " is not uint8");
  check_plain(array, Access::read, name);
  return static_cast<const std::uint8_t*>(array.data());
}

py::tuple py_encode_indices(py::handle object) {
  const std::int32_t* const indices = as_indices(object, "indices");
  const std::size_t count = py::len(object);
  int bits = 0;
  std::size_t room = 0, bytes = 0;
  {
    const py::gil_scoped_release release;
    check_ascending(indices, count, largest_size, "indices");
    bits = choose_low_bits(indices, count);
    room = coded_room(indices, count, bits);
  }
  Bytes coded(static_cast<py::ssize_t>(room));
  char* const out = reinterpret_cast<char*>(coded.mutable_data());
  {
    const py::gil_scoped_release release;
    bytes = encode_gaps(indices, count, bits, out);
  }
  coded.resize({static_cast<py::ssize_t>(bytes)}, false);
  return py::make_tuple(bits, std::move(coded));
}

py::array_t<std::int32_t> py_decode_indices(py::handle object, std::int64_t count, std::int64_t first,
                                            std::int64_t bits, std::int64_t end) {
  const std::uint8_t* const coded = as_bytes(object, "coded");
  const std::size_t bytes = py::len(object);
  const auto below = std::uint32_t(in_range(end, 0, std::int64_t(largest_size), "end"));
  const auto gaps = std::int64_t(8 * bytes);  // each has a bit
  const auto entries = std::size_t(in_range(count, 1, gaps + 1, "count"));
  const int low = int(in_range(bits, 0, most_low_bits, "bits"));
  const auto from = std::uint32_t(in_range(first, 0, std::int64_t(largest_size), "first"));
  py::array_t<std::int32_t> indices(static_cast<py::ssize_t>(entries));
  std::int32_t* const out = indices.mutable_data();
  {
    const py::gil_scoped_release release;
    decode_gaps(reinterpret_cast<const char*>(coded), bytes, entries, from, low, below, out);
  }
  return indices;
}

void py_check_ascending(const py::sequence& parts, std::int64_t end) {
  const std::size_t size = as_size(end);
  for (const py::object part : parts) {
    const std::int32_t* const indices = as_indices(part, "indices");
    const std::size_t count = py::len(part);
    const py::gil_scoped_release release;
    check_ascending(indices, count, size, "indices");
  }
}

int as_bits(std::int64_t bits) {
  if (bits != 4 && bits != 8) refuse("bits must be 4 or 8, not " + std::to_string(bits));
  return int(bits);
}

Levels as_levels(std::int64_t bits, std::int64_t top, std::int64_t shift) {
  const auto by = std::int32_t(in_range(shift, least_shift, most_shift, "shift"));
  if (top & ((1 << by) - 1)) refuse("top must be a multiple of 2^shift, but is " + std::to_string(top));
  return {std::int32_t(in_range(top, 0, infinite_key - 1, "top")), by, largest_level_of(as_bits(bits))};
}

// Calls work with the values and their number.
template <class Work> auto with_values(py::handle object, const Work& work) {
  const py::array values = as_array(object, "values");
  return with_real(values, "values", [&](auto real) {
    using Real = decltype(real);
    check_plain(values, Access::read, "values");
    return work(reinterpret_cast<const Real*>(data_of(values)), std::size_t(values.shape(0)));
  });
}

py::tuple py_key_range(py::handle object) {
  return with_values(object, [](const auto* values, std::size_t count) -> py::tuple {
    std::int32_t low = 0, high = 0;
    {
      const py::gil_scoped_release release;
      key_range(values, count, low, high);
    }
    return py::make_tuple(low, high);
  });
}

py::tuple py_round_levels(py::handle object, std::int64_t bits, std::int64_t top, std::int64_t shift) {
  const Levels levels = as_levels(bits, top, shift);
  return with_values(object, [&](const auto* values, std::size_t count) -> py::tuple {
    using Real = std::remove_const_t<std::remove_pointer_t<decltype(values)>>;
    py::array_t<Real> rounded(static_cast<py::ssize_t>(count)), rest(static_cast<py::ssize_t>(count));
    Real *const near = rounded.mutable_data(), *const left = rest.mutable_data();
    {
      const py::gil_scoped_release release;
      round_to_levels(values, count, levels, near, left);
    }
    return py::make_tuple(std::move(rounded), std::move(rest));
  });
}

Bytes py_encode_levels(py::handle object, std::int64_t bits, std::int64_t top, std::int64_t shift) {
  const Levels levels = as_levels(bits, top, shift);
  return with_values(object, [&](const auto* values, std::size_t count) {
    Bytes codes(static_cast<py::ssize_t>(bits == 8 ? count : (count + 1) / 2));
    std::uint8_t* const out = codes.mutable_data();
    {
      const py::gil_scoped_release release;
      encode_levels(values, count, levels, int(bits), out);
    }
    return codes;
  });
}

template <class Real> py::array decoded(const std::uint8_t* codes, std::size_t count, const Levels& levels, int bits) {
  py::array_t<Real> values(static_cast<py::ssize_t>(count));
  Real* const out = values.mutable_data();
  {
    const py::gil_scoped_release release;
    decode_levels(codes, count, levels, bits, out);
  }
  return std::move(values);
}

py::array py_decode_levels(py::handle object, std::int64_t count, std::int64_t bits, std::int64_t top,
                           std::int64_t shift, const py::dtype& dtype) {
  const Levels levels = as_levels(bits, top, shift);
  const std::uint8_t* const codes = as_bytes(object, "codes");
  const auto most = std::int64_t(py::len(object)) * (8 / bits);
  const auto entries = std::size_t(in_range(count, std::max<std::int64_t>(0, most - (8 / bits - 1)), most, "count"));
  if (dtype.is(py::dtype::of<double>())) return decoded<double>(codes, entries, levels, int(bits));
  if (!dtype.is(py::dtype::of<float>())) refuse("dtype " + text(dtype) + " is neither float32 nor float64");
  return decoded<float>(codes, entries, levels, int(bits));
}

}  // namespace

void define_coding(py::module_& m) {
  m.def("encode_indices", py_encode_indices, py::arg("indices"));
  m.def("decode_indices", py_decode_indices, py::arg("coded"), py::arg("count"), py::arg("first"), py::arg("bits"),
        py::arg("end"));
  m.def("check_ascending", py_check_ascending, py::arg("parts"), py::arg("end"));
  m.def("key_range", py_key_range, py::arg("values"));
  m.def("round_levels", py_round_levels, py::arg("values"), py::arg("bits"), py::arg("top"), py::arg("shift"));
  m.def("encode_levels", py_encode_levels, py::arg("values"), py::arg("bits"), py::arg("top"), py::arg("shift"));
  m.def("decode_levels", py_decode_levels, py::arg("codes"), py::arg("count"), py::arg("bits"), py::arg("top"),
        py::arg("shift"), py::arg("dtype"));
}

}  // namespace hvs
