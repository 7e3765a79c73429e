// Python bindings of linear/: packed weights that borrow checked memory, quantised rows, and
// products.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "linear/linear.h"
#include "linear/variants.h"
#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

WeightKind kind_of(const std::string& name) {
  if (name == "int4") return WeightKind::kInt4;
  if (name == "int8") return WeightKind::kInt8;
  if (name == "bf16") return WeightKind::kBf16;
  if (name == "fp32") return WeightKind::kFp32;
  if (name == "int8_groups") return WeightKind::kInt8Groups;
  if (name == "int8_sparse24") return WeightKind::kInt8Sparse24;
  throw std::invalid_argument("unknown kind " + name +
                              "; known: int4, int8, int8_groups, int8_sparse24, bf16, fp32");
}

PackedWeight shape_of(const std::string& kind, int num_out, int num_in, int group) {
  require(num_out > 0 && num_in > 0 && num_in <= kMaxInputs, "num_out or num_in out of range");
  PackedWeight w = {};
  w.kind = kind_of(kind);
  w.num_out = num_out;
  w.num_in = num_in;
  w.group = has_groups(w.kind) ? group : static_cast<int>(round_up(num_in, kBlock));
  const bool half = w.kind == WeightKind::kInt8Groups && w.group == kBlock / 2;
  require(w.group > 0 && (w.group % kBlock == 0 || half),
          "the group must be a multiple of 32 (int8_groups: or 16)");
  require(!has_groups(w.kind) || w.group <= 128, "the group must be at most 128");
  return w;
}

int64_t packed_bytes(const std::string& kind, int num_out, int num_in, int group) {
  const PackedWeight w = shape_of(kind, num_out, num_in, group);
  return w.num_panels() * w.panel_bytes();
}

void pack(const std::string& kind, uintptr_t q, int num_out, int num_in, int group, uintptr_t lines,
          int64_t num_bytes) {
  const PackedWeight w = shape_of(kind, num_out, num_in, group);
  require(q && lines && num_bytes == w.num_panels() * w.panel_bytes(),
          "q and lines need memory of their sizes");
  require(w.kind != WeightKind::kInt8Sparse24 ||
              is_two_of_four(reinterpret_cast<const int8_t*>(q), num_out, num_in),
          "more than two of four adjacent weights are not zero");
  nb::gil_scoped_release release;
  pack_lines(w, reinterpret_cast<const void*>(q), reinterpret_cast<uint8_t*>(lines));
}

// Borrows lines, scales, zeros, factors, bias, minima and steps: Python keeps them alive. num_* are
// their sizes in elements (zeros and steps have one per group and output, minima as many as
// scales).
struct Weight {
  PackedWeight w;

  Weight(const std::string& kind, int num_out, int num_in, int group, uintptr_t lines,
         int64_t num_bytes, uintptr_t scales, int64_t num_scales, uintptr_t zeros,
         uintptr_t factors, int64_t num_factors, uintptr_t bias, int64_t num_bias, uintptr_t mins,
         uintptr_t steps, uintptr_t min_steps, int span)
      : w(shape_of(kind, num_out, num_in, group)) {
    require((span != 0) == (steps != 0) && span >= 0 && span % w.group == 0,
            "a span must be a multiple of the group, and needs steps");
    require(!mins || (has_groups(w.kind) && !zeros), "minima need groups, and exclude zeros");
    require(!steps || has_groups(w.kind), "steps need groups");
    require((min_steps != 0) == (mins && steps),
            "minima need steps exactly where scales have them");
    w.span = span;
    const int64_t panels = w.num_panels(), expected_scales = panels * w.num_spans() * kPanel;
    require(lines && lines % kLineBytes == 0, "lines must be aligned to 64 bytes");
    require(num_bytes == panels * w.panel_bytes(), "the size of lines does not match the shape");
    require(has_groups(w.kind) == (scales != 0),
            "kinds with groups need scales, the other kinds have none");
    require(!scales || num_scales == expected_scales,
            "the size of scales does not match the shape");
    require(!zeros || w.kind == WeightKind::kInt4, "only int4 has zeros");
    require(takes_floats(w.kind) == (factors == 0),
            "int4 and int8 weights need factors, bf16 and fp32 have none");
    require(!factors || num_factors == panels * kPanel,
            "the size of factors does not match the shape");
    const uint8_t* const all_zeros = reinterpret_cast<const uint8_t*>(zeros);
    uint8_t largest = 0;
    for (int64_t i = 0; zeros && i < panels * w.num_groups() * kPanel; ++i)
      largest = std::max(largest, all_zeros[i]);
    require(largest <= kMaxZero, "a zero-point exceeds 128");
    require(!bias || num_bias == w.num_out, "the size of the bias does not match the shape");
    w.lines = reinterpret_cast<const uint8_t*>(lines);
    w.scales = reinterpret_cast<const uint16_t*>(scales);
    w.zeros = all_zeros;
    w.factors = reinterpret_cast<const float*>(factors);
    w.bias = reinterpret_cast<const float*>(bias);
    w.mins = reinterpret_cast<const uint16_t*>(mins);
    w.steps = reinterpret_cast<const int8_t*>(steps);
    w.min_steps = reinterpret_cast<const int8_t*>(min_steps);
  }
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Rows of int8 with their scales: owns its memory; see QuantRows.
struct Rows {
  QuantRows rows;
  std::unique_ptr<void, Free> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  int max_block = 0;  // of the variant that quantised them: their layout; 0: none did

  Rows(WeightKind kind, int num_rows, int num_in, int group)
      : rows{nullptr, nullptr, nullptr, num_rows, num_in, group, max_row_value(kind)} {
    require(num_rows >= 0 && num_in > 0 && num_in <= kMaxInputs, "num_rows or num_in out of range");
    require(group == kBlock / 2 || (group > 0 && group % kBlock == 0),
            "the group must be 16 or a multiple of 32");
    const int64_t bytes = static_cast<int64_t>(num_rows) * rows.padded_in();
    values.reset(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes + 1, 64))));
    if (!values) throw std::bad_alloc();
    scales.resize(static_cast<size_t>(num_rows) * rows.num_groups());
    sums.resize(scales.size());
    rows.values = static_cast<int8_t*>(values.get());
    rows.scales = scales.data();
    rows.sums = sums.data();
  }
};

std::unique_ptr<Rows> quantise(WeightKind kind, uintptr_t x, int64_t x_stride, int num_rows,
                               int num_in, int group, float row_scale, int num_threads,
                               const std::string& isa) {
  auto out = std::make_unique<Rows>(kind, num_rows, num_in, group);
  require(num_threads > 0 && row_scale >= 0, "num_threads or row_scale out of range");
  require(row_scale == 0 || kind == WeightKind::kInt8 || kind == WeightKind::kInt8Sparse24,
          "only int8 takes rows of one scale that is fixed beforehand");
  if (num_rows == 0) return out;
  require(x && (x_stride >= num_in || num_rows == 1), "x needs memory, and rows must not overlap");
  const LinearOps& ops = linear_ops(isa);
  out->max_block = ops.max_block;
  nb::gil_scoped_release release;
  quantise_rows(ops, reinterpret_cast<const float*>(x), x_stride, row_scale, out->rows,
                num_threads);
  return out;
}

void multiply(const Weight& weight, const Rows& rows, uintptr_t out, int64_t out_stride,
              int num_threads, const std::string& isa) {
  require(!takes_floats(weight.w.kind), "bf16 and fp32 weights take rows of floats");
  require(weight.w.digits == 1, "weights with several digits quantise their rows themselves");
  require(rows.rows.num_in == weight.w.num_in && rows.rows.group == weight.w.group,
          "rows were quantised for another num_in or group");
  require(rows.rows.max_value <= max_row_value(weight.w.kind),
          "rows were quantised for another kind of weight");
  require(num_threads > 0, "num_threads must be positive");
  if (rows.rows.num_rows == 0) return;
  require(out && out_stride >= weight.w.num_out, "out needs memory, and rows must not overlap");
  const LinearOps& ops = linear_ops(isa);
  const int block = block_of(weight.w.group, ops.max_block);
  require(rows.max_block && block_of(weight.w.group, rows.max_block) == block,
          "rows were quantised by another variant, which has another layout");
  nb::gil_scoped_release release;
  linear_quantised(ops, weight.w, rows.rows, reinterpret_cast<float*>(out), out_stride,
                   num_threads);
}

// Float rows: quantised first, in as many digits as the weight has, except for bf16 and fp32.
void linear(const Weight& weight, uintptr_t x, int64_t x_stride, int num_rows, uintptr_t out,
            int64_t out_stride, float row_scale, int num_threads, const std::string& isa) {
  const PackedWeight& w = weight.w;
  if (!takes_floats(w.kind) && w.digits == 1) {
    const auto rows =
        quantise(w.kind, x, x_stride, num_rows, w.num_in, w.group, row_scale, num_threads, isa);
    return multiply(weight, *rows, out, out_stride, num_threads, isa);
  }
  require(num_rows >= 0 && num_threads > 0, "num_rows or num_threads out of range");
  if (num_rows == 0) return;
  require(x && (x_stride >= w.num_in || num_rows == 1),
          "x needs memory, and rows must not overlap");
  require(out && out_stride >= w.num_out, "out needs memory, and rows must not overlap");
  const LinearOps& ops = linear_ops(isa);
  require(row_scale == 0 || takes_floats(w.kind), "row_scale needs a weight with one digit");
  nb::gil_scoped_release release;
  if (w.digits > 1)
    return linear_digits(ops, w, reinterpret_cast<const float*>(x), x_stride, num_rows,
                         reinterpret_cast<float*>(out), out_stride, num_threads);
  linear_float(ops, w, reinterpret_cast<const float*>(x), x_stride, num_rows,
               reinterpret_cast<float*>(out), out_stride, num_threads);
}

void unpack_rows(const Weight& weight, uintptr_t rows, int num_rows, uintptr_t out) {
  require(num_rows >= 0 && (num_rows == 0 || (rows && out)), "rows and out need memory");
  const int64_t* ids = reinterpret_cast<const int64_t*>(rows);
  for (int i = 0; i < num_rows; ++i)
    require(ids[i] >= 0 && ids[i] < weight.w.num_out, "no such row");
  float* to = reinterpret_cast<float*>(out);
  for (int i = 0; i < num_rows; ++i)
    unpack_row(weight.w, static_cast<int>(ids[i]), to + static_cast<int64_t>(i) * weight.w.num_in);
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Weight>(
      m, "LinearWeight",
      "A packed weight; borrows memory that the caller keeps alive (native/linear/linear.h).")
      .def(nb::init<const std::string&, int, int, int, uintptr_t, int64_t, uintptr_t, int64_t,
                    uintptr_t, uintptr_t, int64_t, uintptr_t, int64_t, uintptr_t, uintptr_t,
                    uintptr_t, int>(),
           nb::arg("kind"), nb::arg("num_out"), nb::arg("num_in"), nb::arg("group"),
           nb::arg("lines"), nb::arg("num_bytes"), nb::arg("scales"), nb::arg("num_scales"),
           nb::arg("zeros"), nb::arg("factors"), nb::arg("num_factors"), nb::arg("bias"),
           nb::arg("num_bias"), nb::arg("mins"), nb::arg("steps"), nb::arg("min_steps"),
           nb::arg("span"))
      .def_prop_rw(
          "digits", [](const Weight& weight) { return weight.w.digits; },
          [](Weight& weight, int digits) {
            require(digits >= 1 && digits <= kMaxDigits, "a row takes one to three digits");
            require(digits == 1 || !takes_floats(weight.w.kind),
                    "bf16 and fp32 weights take rows of floats, which have no digits");
            weight.w.digits = digits;
          },
          "As how many quantised rows each row of activations is multiplied "
          "(native/linear/linear.h).")
      .def_prop_ro(
          "address", [](const Weight& weight) { return reinterpret_cast<uintptr_t>(&weight.w); },
          "Of the PackedWeight, for segments: valid while this object lives.");
  nb::class_<Rows>(m, "QuantRows",
                   "Rows of int8 with a scale per row and group, for every linear of that group.")
      .def_prop_ro("num_rows", [](const Rows& r) { return r.rows.num_rows; })
      .def_prop_ro("num_in", [](const Rows& r) { return r.rows.num_in; })
      .def_prop_ro("group", [](const Rows& r) { return r.rows.group; })
      .def_prop_ro("values",
                   [](const Rows& r) { return reinterpret_cast<uintptr_t>(r.rows.values); })
      .def_prop_ro("scales",
                   [](const Rows& r) { return reinterpret_cast<uintptr_t>(r.rows.scales); })
      .def_prop_ro("sums", [](const Rows& r) { return reinterpret_cast<uintptr_t>(r.rows.sums); });
  m.def(
      "linear_isa", [](const std::string& isa) { return std::string(linear_ops(isa).isa); },
      nb::arg("isa"),
      "The variant of the linear kernels that `isa` selects here; 'auto' is the best one.");
  m.def("linear_isas", &linear_isas,
        "The variants that this CPU runs, best first, comma-separated.");
  m.def("packed_bytes", &packed_bytes, nb::arg("kind"), nb::arg("num_out"), nb::arg("num_in"),
        nb::arg("group"));
  m.def("pack_lines", &pack, nb::arg("kind"), nb::arg("q"), nb::arg("num_out"), nb::arg("num_in"),
        nb::arg("group"), nb::arg("lines"), nb::arg("num_bytes"));
  m.def(
      "quantise_rows",
      [](const std::string& kind, uintptr_t x, int64_t x_stride, int num_rows, int num_in,
         int group, float row_scale, int num_threads, const std::string& isa) {
        return quantise(kind_of(kind), x, x_stride, num_rows, num_in, group, row_scale, num_threads,
                        isa);
      },
      nb::arg("kind"), nb::arg("x"), nb::arg("x_stride"), nb::arg("num_rows"), nb::arg("num_in"),
      nb::arg("group"), nb::arg("row_scale"), nb::arg("num_threads"), nb::arg("isa"));
  m.def("linear_quantised", &multiply, nb::arg("weight"), nb::arg("rows"), nb::arg("out"),
        nb::arg("out_stride"), nb::arg("num_threads"), nb::arg("isa"));
  m.def("linear", &linear, nb::arg("weight"), nb::arg("x"), nb::arg("x_stride"),
        nb::arg("num_rows"), nb::arg("out"), nb::arg("out_stride"), nb::arg("row_scale"),
        nb::arg("num_threads"), nb::arg("isa"));
  m.def("unpack_rows", &unpack_rows, nb::arg("weight"), nb::arg("rows"), nb::arg("num_rows"),
        nb::arg("out"));
}

}  // namespace ridgeline
