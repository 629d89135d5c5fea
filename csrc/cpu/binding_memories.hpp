// The functions under the memories that compress what they keep.
#pragma once

#include <pybind11/pybind11.h>

namespace hvs {

void define_memories(pybind11::module_& m);

}  // namespace hvs
