// The Python face of Ridgeline's native code: one module, `ridgeline._native`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "isa.h"

namespace nb = nanobind;

namespace ridgeline {
void bind_attention(nb::module_& m);
void bind_drafts(nb::module_& m);
void bind_fused(nb::module_& m);
void bind_lesson(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_ranges(nb::module_& m);
void bind_sockets(nb::module_& m);
}

NB_MODULE(_native, m) {
  // An engine that is still open when the interpreter ends keeps its cache: nothing worth a warning.
  nb::set_leak_warnings(false);
  m.doc() = "Ridgeline's native kernels, machine probes and socket writes";
  m.def("best_isa", [] { return std::string(ridgeline::isa_name(ridgeline::best_isa())); },
        "The widest kernel variant that this CPU runs: avx512, avx2 or portable.");
  ridgeline::bind_attention(m);
  ridgeline::bind_drafts(m);
  ridgeline::bind_fused(m);
  ridgeline::bind_lesson(m);
  ridgeline::bind_linear(m);
  ridgeline::bind_probe(m);
  ridgeline::bind_ranges(m);
  ridgeline::bind_sockets(m);
}
