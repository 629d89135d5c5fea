// The functions of moments.hpp, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace hvs {

void define_moments(pybind11::module_& m);

}  // namespace hvs
