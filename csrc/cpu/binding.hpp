// The functions that add each part's bindings to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace hvs {

void define_select(pybind11::module_& m);
void define_statistics(pybind11::module_& m);
void define_vectors(pybind11::module_& m);
void define_sketch(pybind11::module_& m);
void define_quantize(pybind11::module_& m);
void define_coding(pybind11::module_& m);
void define_hooks(pybind11::module_& m);  // only in builds for tests

}  // namespace hvs
