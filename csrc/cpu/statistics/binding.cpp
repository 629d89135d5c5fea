#include "binding.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "statistics/statistics.hpp"

namespace hvs {
namespace {

constexpr std::size_t most_thresholds = 16;

py::tuple py_accumulate_moments(const py::sequence& segments, py::handle object, double scale, std::int64_t threads) {
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) {
    const auto step = as_step<decltype(real)>(segments, buffer, scale);
    const std::size_t count = as_threads(threads);
    Sums sums;
    {
      const py::gil_scoped_release release;
      sums = accumulate_moments(step, count);
    }
    return py::make_tuple(step.active(), sums.sum, sums.squares, sums.magnitudes, sums.largest);
  });
}

template <class Real> std::vector<Real> as_thresholds(py::handle object) {
  const py::array array = as_array(object, "thresholds");
  if (format_of(array, "thresholds") != Format::float64) {
    refuse("thresholds: dtype " + text(array.dtype()) + " is not float64");
  }
  check_plain(array, Access::read, "thresholds");
  const auto count = std::size_t(array.shape(0));
  if (count > most_thresholds) {
    refuse("thresholds: " + std::to_string(count) + ", but at most " + std::to_string(most_thresholds) + " at a time");
  }
  std::vector<Real> low;
  for (std::size_t i = 0; i < count; ++i) {
    const double threshold = static_cast<const double*>(array.data())[i];
    if (!(threshold >= 0)) refuse("thresholds must be 0 or more, not " + std::to_string(threshold));
    low.push_back(Real(threshold));
  }
  return low;
}

py::array_t<std::int64_t> py_count_reaching(const py::sequence& segments, py::handle object, py::handle thresholds,
                                            std::int64_t threads) {
  const py::array buffer = as_array(object, "buffer");
  std::vector<std::int64_t> counts;
  with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::read, "buffer");
    const auto size = std::size_t(buffer.shape(0));
    const std::vector<Tensor> tensors = as_tensors(segments, size);
    const std::vector<Real> low = as_thresholds<Real>(thresholds);
    const std::size_t count = as_threads(threads);
    const auto* const x = reinterpret_cast<const Real*>(data_of(buffer));
    const py::gil_scoped_release release;
    counts = count_reaching(x, size, tensors, low, count);
  });
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(counts.size()), counts.data());
}

py::tuple py_tail(const py::sequence& segments, py::handle object, double threshold, std::int64_t threads) {
  if (!(threshold >= 0)) refuse("threshold must be 0 or more, not " + std::to_string(threshold));
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::read, "buffer");
    const auto size = std::size_t(buffer.shape(0));
    const std::vector<Tensor> tensors = as_tensors(segments, size);
    const std::size_t count = as_threads(threads);
    const auto* const x = reinterpret_cast<const Real*>(data_of(buffer));
    Tail found;
    {
      const py::gil_scoped_release release;
      found = tail(x, size, tensors, Real(threshold), count);
    }
    return py::make_tuple(found.count, found.magnitudes);
  });
}

double py_square_norm(const py::sequence& segments) {
  const std::vector<Tensor> tensors = as_tensors(segments, largest_size);
  const py::gil_scoped_release release;
  return square_norm(tensors);
}

py::array_t<double> py_block_scores(const py::sequence& segments, py::handle object, std::int64_t block,
                                    std::int64_t threads) {
  if (block < 1) refuse("block must be 1 or more, not " + std::to_string(block));
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) {
    using Real = decltype(real);
    check_plain(buffer, Access::read, "buffer");
    const auto size = std::size_t(buffer.shape(0));
    const auto length = std::min(std::size_t(block), std::max<std::size_t>(size, 1));
    const std::vector<Tensor> tensors = as_tensors(segments, size);
    const std::size_t count = as_threads(threads);
    py::array_t<double> scores(static_cast<py::ssize_t>((size + length - 1) / length));
    const auto* const x = reinterpret_cast<const Real*>(data_of(buffer));
    double* const out = scores.mutable_data();
    {
      const py::gil_scoped_release release;
      block_scores(x, size, tensors, length, count, out);
    }
    return scores;
  });
}

py::array py_sample(const py::sequence& segments, py::handle object, double scale, std::int64_t start,
                    std::int64_t stride) {
  if (stride < 1) refuse("stride must be 1 or more, not " + std::to_string(stride));
  if (start < 0 || start >= stride) {
    refuse("start must be 0 or more and below the stride, " + std::to_string(stride) + ", not " +
           std::to_string(start));
  }
  const py::array buffer = as_array(object, "buffer");
  return with_real(buffer, "buffer", [&](auto real) -> py::array {
    using Real = decltype(real);
    const auto step = as_step<Real>(segments, buffer, scale, Access::read);
    const std::size_t count = sample_count(step.active(), std::size_t(start), std::size_t(stride));
    py::array_t<Real> values(static_cast<py::ssize_t>(count));
    Real* const out = values.mutable_data();
    {
      const py::gil_scoped_release release;
      sample(step, std::size_t(start), std::size_t(stride), out);
    }
    return std::move(values);
  });
}

double py_largest(const py::sequence& segments) {
  const std::vector<Tensor> tensors = as_tensors(segments, largest_size);
  const py::gil_scoped_release release;
  return largest(tensors);
}

}  // namespace

void define_statistics(py::module_& m) {
  m.def("accumulate_moments", py_accumulate_moments, py::arg("gradients"), py::arg("buffer"), py::arg("scale") = 1.0,
        py::arg("threads") = 1);
  m.def("count_reaching", py_count_reaching, py::arg("gradients"), py::arg("buffer"), py::arg("thresholds"),
        py::arg("threads") = 1);
  m.def("tail", py_tail, py::arg("gradients"), py::arg("buffer"), py::arg("threshold"), py::arg("threads") = 1);
  m.def("square_norm", py_square_norm, py::arg("gradients"));
  m.def("block_scores", py_block_scores, py::arg("gradients"), py::arg("buffer"), py::arg("block"),
        py::arg("threads") = 1);
  m.def("sample", py_sample, py::arg("gradients"), py::arg("buffer"), py::arg("scale"), py::arg("start"),
        py::arg("stride"));
  m.def("largest", py_largest, py::arg("gradients"));
}

}  // namespace hvs
