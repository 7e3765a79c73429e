// Python bindings of quantize/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "quantize/scale_search.h"
#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

void search_scales(uintptr_t weight, uintptr_t error, uintptr_t others, uintptr_t moment,
                   uintptr_t scales, uintptr_t zeros, uintptr_t chosen, long stride, int num_rows,
                   int size, int num_scales, int num_zeros, float low, float high, int num_threads,
                   const std::string& isa) {
  require(weight && error && others && moment && scales && zeros && chosen,
          "every argument needs memory");
  require(num_rows > 0 && num_scales > 0 && num_zeros > 0 && num_threads > 0,
          "sizes must be positive");
  require(size > 0 && size <= kMaxSearchGroup && size <= stride,
          "a group has 1 to 128 inputs of its rows");
  require(num_scales * num_zeros <= kMaxCandidates, "too many candidates");
  const Isa variant = isa_from(isa);
  nb::gil_scoped_release release;
  const ScaleSearchArgs args = {reinterpret_cast<const float*>(weight),
                                reinterpret_cast<float*>(error),
                                reinterpret_cast<const float*>(others),
                                reinterpret_cast<const float*>(moment),
                                reinterpret_cast<const float*>(scales),
                                reinterpret_cast<const float*>(zeros),
                                reinterpret_cast<int*>(chosen),
                                stride,
                                num_rows,
                                size,
                                num_scales,
                                num_zeros,
                                num_threads,
                                low,
                                high};
#if defined(__x86_64__)
  if (variant == Isa::kAvx512) return search_scales_avx512(args);
  if (variant == Isa::kAvx2) return search_scales_avx2(args);
#endif
  search_scales_portable(args);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def(
      "search_scales", &search_scales, nb::arg("weight"), nb::arg("error"), nb::arg("others"),
      nb::arg("moment"), nb::arg("scales"), nb::arg("zeros"), nb::arg("chosen"), nb::arg("stride"),
      nb::arg("num_rows"), nb::arg("size"), nb::arg("num_scales"), nb::arg("num_zeros"),
      nb::arg("low"), nb::arg("high"), nb::arg("num_threads"), nb::arg("isa"),
      "Searches scales and zero-points of one group of each row (native/quantize/scale_search.h).");
}

}  // namespace ridgeline
