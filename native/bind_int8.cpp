// Python face of the INT8 linear: a packed weight that owns its memory, and the product.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "int8_linear.h"
#include "isa.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

// W[N, K] in panels (see int8_linear.h), its scales and its bias.
struct Int8Weight {
  std::vector<int8_t> packed;
  std::vector<float> scales, bias;
  int num_out, num_in;

  Int8Weight(uintptr_t weight, uintptr_t scales_, uintptr_t bias_, int num_out, int num_in)
      : num_out(num_out), num_in(num_in) {
    require(weight && scales_, "weight and scales need memory");
    require(num_out > 0 && num_in > 0 && num_in <= kMaxInputs, "num_out or num_in out of range");
    const float* s = reinterpret_cast<const float*>(scales_);
    scales.assign(s, s + num_out);
    if (bias_) bias.assign(reinterpret_cast<const float*>(bias_), reinterpret_cast<const float*>(bias_) + num_out);
    pack(reinterpret_cast<const int8_t*>(weight));
  }

  void pack(const int8_t* w) {
    const int64_t panel_bytes = static_cast<int64_t>(num_pairs(num_in)) * 2 * kPanel;
    packed.assign(panel_bytes * num_panels(num_out), 0);
    for (int n = 0; n < num_out; ++n) {
      int8_t* panel = packed.data() + n / kPanel * panel_bytes + 2 * (n % kPanel);
      for (int k = 0; k < num_in; ++k) panel[k / 2 * 2 * kPanel + k % 2] = w[static_cast<int64_t>(n) * num_in + k];
    }
  }

  size_t nbytes() const { return packed.size() + 4 * (scales.size() + bias.size()); }
};

// Waking a sleeping thread costs as much as some million multiply-adds: small products stay on one.
int worthwhile_threads(const Int8Weight& weight, int num_rows, int num_threads) {
  const int64_t macs = static_cast<int64_t>(weight.num_out) * weight.num_in * num_rows;
  const int64_t worth = (macs >> 22) + 1;
  return worth < num_threads ? static_cast<int>(worth) : num_threads;
}

void linear_int8(const Int8Weight& weight, uintptr_t x, int64_t x_stride, int num_rows, uintptr_t out,
                 float row_scale, int num_threads, const std::string& isa) {
  require(num_rows >= 0 && num_threads > 0 && row_scale >= 0, "num_rows, row_scale or num_threads out of range");
  if (num_rows == 0) return;
  require(x && out, "x and out need memory");
  require(x_stride >= weight.num_in || num_rows == 1, "rows of x overlap");
  const Int8Args args = {reinterpret_cast<const float*>(x), x_stride, weight.packed.data(), weight.scales.data(),
                         weight.bias.empty() ? nullptr : weight.bias.data(), reinterpret_cast<float*>(out),
                         row_scale, num_rows, weight.num_out, weight.num_in,
                         worthwhile_threads(weight, num_rows, num_threads)};
  const Isa chosen = isa_from(isa);
  nb::gil_scoped_release release;
#if defined(__x86_64__)
  if (chosen != Isa::kPortable) return linear_int8_avx2(args);
#endif
  linear_int8_portable(args);
}

}  // namespace

void bind_int8(nb::module_& m) {
  nb::class_<Int8Weight>(m, "Int8Weight")
      .def(nb::init<uintptr_t, uintptr_t, uintptr_t, int, int>(), nb::arg("weight"), nb::arg("scales"),
           nb::arg("bias"), nb::arg("num_out"), nb::arg("num_in"))
      .def_prop_ro("nbytes", &Int8Weight::nbytes);
  m.def("linear_int8", &linear_int8, nb::arg("weight"), nb::arg("x"), nb::arg("x_stride"),
        nb::arg("num_rows"), nb::arg("out"), nb::arg("row_scale"), nb::arg("num_threads"), nb::arg("isa"));
}

}  // namespace ridgeline
