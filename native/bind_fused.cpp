// Python face of the fused layers: segments, the frame they work in, and operators on their own for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_isa.h"
#include "isa.h"
#include "linear_isa.h"
#include "sample.h"
#include "segment.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

const RowOps& row_ops(const std::string& name) {
  switch (isa_from(name)) {
#if defined(__x86_64__)
    case Isa::kAvx512: return row_ops_avx512();
    case Isa::kAvx2: return row_ops_avx2();
#endif
    default: return row_ops_portable();
  }
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  throw std::invalid_argument("unknown activation " + name + "; known: silu, gelu, gelu_tanh");
}

Slot slot_of(const std::string& name) {
  constexpr const char* kNames[kNumSlots] = {"residual", "branch", "wide", "normed",   "pairs",
                                                 "heads",    "attended", "out"};
  for (int i = 0; i < kNumSlots; ++i)
    if (name == kNames[i]) return static_cast<Slot>(i);
  throw std::invalid_argument("unknown slot " + name);
}

const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }
const PackedWeight* weight_at(uintptr_t address) { return reinterpret_cast<const PackedWeight*>(address); }

// One step begins; `out` has room for num_rows rows of the last hidden states.
void begin(Frame& f, int num_rows, uintptr_t tokens, uintptr_t positions, uintptr_t out) {
  require(num_rows > 0 && tokens && positions, "a step has rows, tokens and positions");
  f.num_rows = num_rows;
  f.tokens = reinterpret_cast<const int64_t*>(tokens);
  f.positions = reinterpret_cast<const int64_t*>(positions);
  f.slots[kOut] = reinterpret_cast<float*>(out);
}

void set_turns(Frame& f, size_t rope, uintptr_t table, int64_t num_positions, int rotated) {
  require(table && num_positions > 0 && rotated > 0 && rope < 64, "the rope's table needs memory");
  if (f.turns.size() <= rope) f.turns.resize(rope + 1);
  f.turns[rope] = {floats(table), num_positions, rotated};
}

// A piece of a step, attention before it and behind it being somebody else's.
void run(const Segment& segment, Frame& frame, uintptr_t attended, uintptr_t heads, int num_threads) {
  require(num_threads > 0 && frame.num_rows > 0, "num_threads must be positive, and a step begun");
  frame.plan = nullptr;
  frame.num_threads = num_threads;
  frame.slots[kAttended] = reinterpret_cast<float*>(attended);
  frame.slots[kHeads] = reinterpret_cast<float*>(heads);
  nb::gil_scoped_release release;
  segment.run(frame);
}

// A whole step.
void run_step(const Segment& segment, Frame& frame, const AttentionPlan& plan, int num_threads) {
  require(num_threads > 0 && frame.num_rows > 0, "num_threads must be positive, and a step begun");
  frame.plan = &plan;
  frame.num_threads = num_threads;
  nb::gil_scoped_release release;
  segment.run(frame);
}

// Seconds by operator since the profile was last read; reading it begins a new one.
std::map<std::string, double> profile(Frame& frame, bool on) {
  frame.profiling = on;
  return std::exchange(frame.seconds, {});
}

void check_rows(uintptr_t x, int64_t stride, int64_t num_rows, int64_t width) {
  require(num_rows >= 0 && width > 0 && (num_rows == 0 || x), "rows need memory");
  require(stride >= width || num_rows <= 1, "rows must not overlap");
}

// The first largest of each row; -1 where a row holds a NaN or its largest is infinite.
std::vector<int64_t> first_largest(uintptr_t x, int64_t stride, int64_t num_rows, int64_t width, int num_threads,
                                   const std::string& isa) {
  check_rows(x, stride, num_rows, width);
  const RowOps& ops = row_ops(isa);
  std::vector<int64_t> at(static_cast<size_t>(num_rows));
  nb::gil_scoped_release release;
  const int threads = num_rows * width > (1 << 19) ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* from = floats(x) + row * stride;
    const int64_t found = ops.first_largest(from, width);
    at[row] = found >= 0 && std::isfinite(from[found]) ? found : -1;
  }
  return at;
}

// One token per row of logits, -1 where there is no choice; see sample.h. `asked` holds five numbers per row:
// temperature, min_p, top_k, top_p, and the uniform number of the draw.
std::vector<int64_t> draw(uintptr_t x, int64_t stride, int64_t num_rows, int64_t width,
                          const std::vector<double>& asked, int num_threads, const std::string& isa) {
  check_rows(x, stride, num_rows, width);
  require(static_cast<int64_t>(asked.size()) == 5 * num_rows, "five numbers are asked of each row");
  const RowOps& ops = row_ops(isa);
  std::vector<int64_t> to(static_cast<size_t>(num_rows));
  nb::gil_scoped_release release;
  const int threads = num_rows > 1 ? num_threads : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    const double* r = asked.data() + 5 * row;
    to[row] = draw_token(ops, floats(x) + row * stride, width, {r[0], r[1], static_cast<int64_t>(r[2]), r[3], r[4]});
  }
  return to;
}

GatedPlan gated_plan(uintptr_t weight, const std::string& act, uintptr_t for_weight) {
  require(weight && for_weight, "no weight");
  const PackedWeight &from = *weight_at(weight), &into = *weight_at(for_weight);
  require(from.num_out == 2 * into.num_in, "the weight has other inputs");
  return {&from, activation_of(act), into.num_in, &into};
}

}  // namespace

void bind_fused(nb::module_& m) {
  nb::class_<Frame>(m, "FusedFrame")
      .def("__init__", [](Frame* self, const std::string& isa) {
        new (self) Frame();
        self->linear = &linear_ops(isa);
        self->row = &row_ops(isa);
      }, nb::arg("isa"))
      .def("begin", &begin, nb::arg("num_rows"), nb::arg("tokens"), nb::arg("positions"), nb::arg("out"))
      .def("set_turns", &set_turns, nb::arg("rope"), nb::arg("table"), nb::arg("num_positions"), nb::arg("rotated"))
      .def("profile", &profile, nb::arg("on"))
      .def_prop_ro("nbytes", &Frame::bytes);
  nb::class_<Segment>(m, "FusedSegment")
      .def(nb::init<>())
      .def("embed", [](Segment& s, uintptr_t table, bool is_bf16, int64_t num_tokens, int width, float scale) {
        require(table && num_tokens > 0 && width > 0, "the table needs memory");
        s.add(embed_op(reinterpret_cast<const void*>(table), is_bf16, num_tokens, width, scale));
      }, nb::arg("table"), nb::arg("is_bf16"), nb::arg("num_tokens"), nb::arg("width"), nb::arg("scale"))
      .def("embed_packed", [](Segment& s, uintptr_t table, float scale) {
        require(table, "no table");
        s.add(embed_packed_op(weight_at(table), scale));
      }, nb::arg("table"), nb::arg("scale"))
      .def("rows", [](Segment& s, const std::string& from, int width, bool add_branch, uintptr_t branch_gain, bool norm,
                      uintptr_t gain, float eps, uintptr_t for_weight, const std::string& to) {
        require(width > 0 && (!for_weight || weight_at(for_weight)->num_in == width), "the weight has other inputs");
        s.add(row_op({slot_of(from), width, add_branch, floats(branch_gain), norm, floats(gain), eps,
                      weight_at(for_weight), slot_of(to)}));
      }, nb::arg("source"), nb::arg("width"), nb::arg("add_branch"), nb::arg("branch_gain"), nb::arg("norm"),
         nb::arg("gain"), nb::arg("eps"), nb::arg("for_weight"), nb::arg("to"))
      .def("linear", [](Segment& s, uintptr_t weight, const std::string& to, bool gated) {
        require(weight, "no weight");
        s.add(linear_op(weight_at(weight), slot_of(to), gated));
      }, nb::arg("weight"), nb::arg("to"), nb::arg("gated"))
      .def("gated_linear", [](Segment& s, uintptr_t weight, const std::string& act, uintptr_t for_weight) {
        s.add(gated_linear_op(gated_plan(weight, act, for_weight)));
      }, nb::arg("weight"), nb::arg("activation"), nb::arg("for_weight"))
      .def("gate", [](Segment& s, uintptr_t weight, const std::string& act, uintptr_t for_weight) {
        s.add(gate_op(gated_plan(weight, act, for_weight)));
      }, nb::arg("weight"), nb::arg("activation"), nb::arg("for_weight"))
      .def("turn", [](Segment& s, int num_q, int num_k, int num_heads, int head_dim, int rope, uintptr_t q_gain,
                      uintptr_t k_gain, float eps, const PagedKv* kv, const std::string& isa) {
        require(num_q > 0 && num_k > 0 && num_q + num_k <= num_heads && head_dim > 0 && rope >= 0, "heads out of range");
        require(!kv || (kv->num_kv_heads == num_k && kv->head_dim == head_dim && num_q + 2 * num_k == num_heads),
                "the KV cache has other heads");
        s.add(turn_op({num_q, num_k, num_heads, head_dim, rope, floats(q_gain), floats(k_gain), eps, kv,
                       &attention_ops(isa)}));
      }, nb::arg("num_q"), nb::arg("num_k"), nb::arg("num_heads"), nb::arg("head_dim"), nb::arg("rope"),
         nb::arg("q_gain"), nb::arg("k_gain"), nb::arg("eps"), nb::arg("kv").none(), nb::arg("isa"))
      .def("attend", [](Segment& s, const PagedKv& kv, int num_heads, float scale, int window, float softcap,
                        const std::string& isa) {
        add_attention(s, kv, {num_heads, scale, window, softcap}, attention_ops(isa));
        s.end_layer();
      }, nb::arg("kv"), nb::arg("num_heads"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("isa"))
      .def("mark", &Segment::mark, nb::arg("name"))
      .def("experts", [](Segment& s, uintptr_t router, const std::vector<uintptr_t>& gate_up,
                         const std::vector<uintptr_t>& down, int width, int num_chosen, bool norm_topk,
                         const std::string& act) {
        ExpertsPlan plan = {floats(router), {}, {}, width, num_chosen, norm_topk, activation_of(act)};
        for (uintptr_t each : gate_up) plan.gate_up.push_back(weight_at(each));
        for (uintptr_t each : down) plan.down.push_back(weight_at(each));
        require(router, "the router needs memory");
        add_experts(s, plan);
      }, nb::arg("router"), nb::arg("gate_up"), nb::arg("down"), nb::arg("width"), nb::arg("num_chosen"),
         nb::arg("norm_topk"), nb::arg("activation"))
      .def("run_step", &run_step, nb::arg("frame"), nb::arg("plan"), nb::arg("num_threads"))
      .def("run", &run, nb::arg("frame"), nb::arg("attended"), nb::arg("heads"), nb::arg("num_threads"));
  m.def("first_largest", &first_largest, nb::arg("x"), nb::arg("stride"), nb::arg("num_rows"), nb::arg("width"),
        nb::arg("num_threads"), nb::arg("isa"));
  m.def("draw", &draw, nb::arg("x"), nb::arg("stride"), nb::arg("num_rows"), nb::arg("width"), nb::arg("asked"),
        nb::arg("num_threads"), nb::arg("isa"));
}

}  // namespace ridgeline
