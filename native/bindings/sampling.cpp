// Python bindings of sampling/, and of the argmax of layer/row_ops.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string>
#include <vector>

#include "bindings/row_ops.h"
#include "sampling/draw.h"
#include "sampling/forbid.h"
#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }

void check_rows(uintptr_t x, int64_t stride, int64_t num_rows, int64_t width) {
  require(num_rows >= 0 && width > 0 && (num_rows == 0 || x), "rows need memory");
  require(stride >= width || num_rows <= 1, "rows must not overlap");
}

// The first largest of each row; -1 where a row holds a NaN or its largest is infinite.
std::vector<int64_t> first_largest(uintptr_t x, int64_t stride, int64_t num_rows, int64_t width,
                                   int num_threads, const std::string& isa) {
  check_rows(x, stride, num_rows, width);
  const RowOps& ops = row_ops(isa);
  std::vector<int64_t> at(static_cast<size_t>(num_rows));
  nb::gil_scoped_release release;
  const int threads = num_rows * width > (1 << 19) ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* from = floats(x) + row * stride;
    const int64_t best = ops.argmax(from, width);
    at[row] = best >= 0 && std::isfinite(from[best]) ? best : -1;
  }
  return at;
}

// One token per row of logits, -1 where none can be chosen. `params` holds five numbers per row:
// temperature, min_p, top_k, top_p, and the uniform number of the draw.
std::vector<int64_t> draw(uintptr_t x, int64_t stride, int64_t num_rows, int64_t width,
                          const std::vector<double>& params, int num_threads,
                          const std::string& isa) {
  check_rows(x, stride, num_rows, width);
  require(static_cast<int64_t>(params.size()) == 5 * num_rows, "each row needs five parameters");
  const RowOps& ops = row_ops(isa);
  std::vector<int64_t> to(static_cast<size_t>(num_rows));
  nb::gil_scoped_release release;
  const int threads = num_rows > 1 ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const double* r = params.data() + 5 * row;
    to[row] = draw_token(ops, floats(x) + row * stride, width,
                         {r[0], r[1], static_cast<int64_t>(r[2]), r[3], r[4]});
  }
  return to;
}

// Applies the row i of `words` to row rows[i] of the logits.
void forbid(uintptr_t x, int64_t stride, int64_t width, const std::vector<int64_t>& rows,
            uintptr_t words, int64_t num_words, int num_threads) {
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  check_rows(x, stride, num_rows, width);
  require(num_words * 32 >= width, "each token needs a bit");
  require(num_rows == 0 || words, "bits need memory");
  nb::gil_scoped_release release;
  const int threads = num_rows * width > (1 << 19) ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < num_rows; ++i)
    forbid_tokens(reinterpret_cast<float*>(x) + rows[i] * stride, width,
                  reinterpret_cast<const uint32_t*>(words) + i * num_words);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("first_largest", &first_largest, nb::arg("x"), nb::arg("stride"), nb::arg("num_rows"),
        nb::arg("width"), nb::arg("num_threads"), nb::arg("isa"),
        "The first largest of each row; -1 where a row has a NaN or its largest is not finite.");
  m.def("draw", &draw, nb::arg("x"), nb::arg("stride"), nb::arg("num_rows"), nb::arg("width"),
        nb::arg("params"), nb::arg("num_threads"), nb::arg("isa"),
        "One token per row of logits; -1 where none can be chosen. `params` holds temperature, "
        "min_p, top_k, top_p "
        "and the uniform number of each row.");
  m.def("forbid", &forbid, nb::arg("x"), nb::arg("stride"), nb::arg("width"), nb::arg("rows"),
        nb::arg("words"), nb::arg("num_words"), nb::arg("num_threads"),
        "Sets the logits of the named rows to minus infinity where a token's bit is 0; each row "
        "has `num_words` words of 32 bits.");
}

}  // namespace ridgeline
