// The Python module. The binding of each part checks the arguments, then does the work without the GIL.
#include <pybind11/stl.h>

#include "binding.hpp"
#include "simd/level.hpp"

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "The kernels of horovod_sparse.kernels.cpu, where they are described.";
  hvs::define_select(m);
  hvs::define_statistics(m);
  hvs::define_vectors(m);
  hvs::define_sketch(m);
  hvs::define_quantize(m);
  hvs::define_coding(m);
  m.def("simd_level", hvs::simd_level);
  m.def("use_simd", hvs::use_simd);
#ifdef HOROVOD_SPARSE_TEST_HOOKS
  hvs::define_hooks(m);
#endif
}
