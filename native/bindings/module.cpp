// The Python module `ridgeline._native`. Functions check every shape, stride and index before a
// pointer is used, and raise ValueError. Pointers come as integers (tensor.data_ptr()): importing a
// tensor through DLPack costs more than a kernel itself at decode sizes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
void bind_attention(nb::module_& m);
void bind_exchange(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_speculation(nb::module_& m);
}  // namespace ridgeline

NB_MODULE(_native, m) {
  // An engine that is still open when the interpreter exits keeps its cache: not worth a warning.
  nb::set_leak_warnings(false);
  m.doc() = "Ridgeline's native kernels and machine probes.";
  m.def(
      "best_isa", [] { return std::string(ridgeline::isa_name(ridgeline::best_isa())); },
      "The widest instruction set that this CPU runs: avx512, avx2 or portable.");
  ridgeline::bind_attention(m);
  ridgeline::bind_exchange(m);
  ridgeline::bind_layer(m);
  ridgeline::bind_linear(m);
  ridgeline::bind_probe(m);
  ridgeline::bind_quantize(m);
  ridgeline::bind_sampling(m);
  ridgeline::bind_speculation(m);
}
