// Python bindings of layer/: segments, and the frame they work in.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/variants.h"
#include "bindings/row_ops.h"
#include "layer/segment.h"
#include "linear/variants.h"
#include "simd/dispatch.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu2") return Activation::kRelu2;
  if (name == "clamped_swiglu") return Activation::kClampedSwiglu;
  throw std::invalid_argument("unknown activation " + name +
                              "; known: silu, gelu, gelu_tanh, relu2, clamped_swiglu");
}

Slot slot_of(const std::string& name) {
  constexpr const char* kNames[kNumSlots] = {"residual",    "branch", "gate_up",  "normed",
                                             "expert_rows", "qkv",    "attended", "out"};
  for (int i = 0; i < kNumSlots; ++i)
    if (name == kNames[i]) return static_cast<Slot>(i);
  throw std::invalid_argument("unknown slot " + name);
}

const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }
const PackedWeight* weight_at(uintptr_t address) {
  return reinterpret_cast<const PackedWeight*>(address);
}

// Begins a step; `out` has room for num_rows rows of the last hidden states.
void begin(Frame& f, int num_rows, uintptr_t tokens, uintptr_t positions, uintptr_t out) {
  require(num_rows > 0 && tokens && positions, "a step needs rows, tokens and positions");
  f.num_rows = num_rows;
  f.tokens = reinterpret_cast<const int64_t*>(tokens);
  f.positions = reinterpret_cast<const int64_t*>(positions);
  f.slots[kOut] = reinterpret_cast<float*>(out);
}

void set_rope(Frame& f, size_t rope, uintptr_t table, int64_t num_positions, int rotated) {
  require(table && num_positions > 0 && rotated > 0 && rope < 64,
          "the rotary embedding's table needs memory");
  if (f.ropes.size() <= rope) f.ropes.resize(rope + 1);
  f.ropes[rope] = {floats(table), num_positions, rotated};
}

// Runs a part of a step, between attention that runs elsewhere.
void run(const Segment& segment, Frame& frame, uintptr_t attended, uintptr_t heads,
         int num_threads) {
  require(num_threads > 0 && frame.num_rows > 0,
          "num_threads must be positive, and a step must have begun");
  frame.plans.clear();
  frame.num_threads = num_threads;
  frame.slots[kAttended] = reinterpret_cast<float*>(attended);
  frame.slots[kQkv] = reinterpret_cast<float*>(heads);
  nb::gil_scoped_release release;
  segment.run(frame);
}

// Runs a whole step, with a plan for each group of layers.
void run_step(const Segment& segment, Frame& frame, std::vector<const AttentionPlan*> plans,
              int num_threads) {
  require(num_threads > 0 && frame.num_rows > 0 && !plans.empty(),
          "num_threads must be positive, and a step must have begun and have plans");
  frame.plans = std::move(plans);
  frame.num_threads = num_threads;
  nb::gil_scoped_release release;
  segment.run(frame);
}

// Seconds by operator since the last call, which begins a new profile.
std::map<std::string, double> profile(Frame& frame, bool on) {
  frame.profiling = on;
  return std::exchange(frame.seconds, {});
}

GatePlan gate_plan(uintptr_t weight, const std::string& act, uintptr_t for_weight) {
  require(weight && for_weight, "no weight");
  const PackedWeight &from = *weight_at(weight), &into = *weight_at(for_weight);
  const bool gated = from.num_out == 2 * into.num_in;
  require(gated || from.num_out == into.num_in, "the weight has another number of inputs");
  return {&from, activation_of(act), into.num_in, &into, gated};
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Frame>(m, "FusedFrame", "Memory of one decoder's steps (native/layer/segment.h).")
      .def(
          "__init__",
          [](Frame* self, const std::string& isa) {
            new (self) Frame();
            self->linear = &linear_ops(isa);
            self->row = &row_ops(isa);
          },
          nb::arg("isa"))
      .def("begin", &begin, nb::arg("num_rows"), nb::arg("tokens"), nb::arg("positions"),
           nb::arg("out"))
      .def("set_rope", &set_rope, nb::arg("rope"), nb::arg("table"), nb::arg("num_positions"),
           nb::arg("rotated"),
           "Sets the cos and sin table [positions, 2, rotated] of a rotary embedding.")
      .def("profile", &profile, nb::arg("on"))
      .def_prop_ro("nbytes", &Frame::bytes);
  nb::class_<Segment>(m, "FusedSegment",
                      "Operators that run in one parallel region; borrows all memory it is given.")
      .def(nb::init<>())
      .def(
          "embed",
          [](Segment& s, uintptr_t table, bool is_bf16, int64_t num_tokens, int width,
             float scale) {
            require(table && num_tokens > 0 && width > 0, "the table needs memory");
            s.add(
                embed_op(reinterpret_cast<const void*>(table), is_bf16, num_tokens, width, scale));
          },
          nb::arg("table"), nb::arg("is_bf16"), nb::arg("num_tokens"), nb::arg("width"),
          nb::arg("scale"))
      .def(
          "embed_packed",
          [](Segment& s, uintptr_t table, float scale) {
            require(table, "no table");
            s.add(embed_packed_op(weight_at(table), scale));
          },
          nb::arg("table"), nb::arg("scale"))
      .def(
          "rows",
          [](Segment& s, const std::string& from, int width, bool add_branch, uintptr_t branch_gain,
             bool norm, uintptr_t gain, float eps, uintptr_t for_weight, const std::string& to,
             float branch_scale) {
            require(width > 0 && (!for_weight || weight_at(for_weight)->num_in == width),
                    "the weight has another number of inputs");
            s.add(row_op({slot_of(from), width, add_branch, floats(branch_gain), norm, floats(gain),
                          eps, weight_at(for_weight), slot_of(to), branch_scale}));
          },
          nb::arg("source"), nb::arg("width"), nb::arg("add_branch"), nb::arg("branch_gain"),
          nb::arg("norm"), nb::arg("gain"), nb::arg("eps"), nb::arg("for_weight"), nb::arg("to"),
          nb::arg("branch_scale") = 1.0f)
      .def(
          "linear",
          [](Segment& s, uintptr_t weight, const std::string& to, bool gated) {
            require(weight, "no weight");
            s.add(linear_op(weight_at(weight), slot_of(to), gated));
          },
          nb::arg("weight"), nb::arg("to"), nb::arg("gated"))
      .def(
          "gate_up",
          [](Segment& s, uintptr_t weight, const std::string& act, uintptr_t for_weight) {
            s.add(gate_up_op(gate_plan(weight, act, for_weight)));
          },
          nb::arg("weight"), nb::arg("activation"), nb::arg("for_weight"))
      .def(
          "gate",
          [](Segment& s, uintptr_t weight, const std::string& act, uintptr_t for_weight) {
            s.add(gate_op(gate_plan(weight, act, for_weight)));
          },
          nb::arg("weight"), nb::arg("activation"), nb::arg("for_weight"))
      .def(
          "rope",
          [](Segment& s, int num_q, int num_k, int num_heads, int head_dim, int rope,
             uintptr_t q_gain, uintptr_t k_gain, float eps, const PagedKv* kv,
             const std::string& isa, bool norm_rows, bool interleaved, int group) {
            require(
                num_q > 0 && num_k > 0 && num_q + num_k <= num_heads && head_dim > 0 && rope >= 0,
                "heads out of range");
            require(!kv || (kv->num_kv_heads == num_k && kv->head_dim == head_dim &&
                            num_q + 2 * num_k == num_heads),
                    "the KV cache has other heads");
            s.add(rope_op({num_q, num_k, num_heads, head_dim, rope, floats(q_gain), floats(k_gain),
                           eps, kv, &attention_ops(isa), norm_rows, interleaved, group}));
          },
          nb::arg("num_q"), nb::arg("num_k"), nb::arg("num_heads"), nb::arg("head_dim"),
          nb::arg("rope"), nb::arg("q_gain"), nb::arg("k_gain"), nb::arg("eps"),
          nb::arg("kv").none(), nb::arg("isa"), nb::arg("norm_rows") = false,
          nb::arg("interleaved") = false, nb::arg("group") = 0)
      .def(
          "attend",
          [](Segment& s, const PagedKv& kv, int num_heads, float scale, int window, float softcap,
             const std::string& isa, uintptr_t sinks, int group) {
            add_attention(s, kv, {num_heads, scale, window, softcap, floats(sinks)},
                          attention_ops(isa), group);
            s.end_layer();
          },
          nb::arg("kv"), nb::arg("num_heads"), nb::arg("scale"), nb::arg("window"),
          nb::arg("softcap"), nb::arg("isa"), nb::arg("sinks") = 0, nb::arg("group") = 0)
      .def("mark", &Segment::mark, nb::arg("name"))
      .def(
          "experts",
          [](Segment& s, uintptr_t router, const std::vector<uintptr_t>& gate_up,
             const std::vector<uintptr_t>& down, int width, int num_chosen, bool norm_topk,
             const std::string& act, uintptr_t router_bias, uintptr_t correction, bool sigmoid,
             float factor) {
            ExpertsPlan plan = {floats(router),      {},
                                {},                  width,
                                num_chosen,          norm_topk,
                                activation_of(act),  floats(router_bias),
                                floats(correction),  sigmoid,
                                factor};
            for (uintptr_t each : gate_up) plan.gate_up.push_back(weight_at(each));
            for (uintptr_t each : down) plan.down.push_back(weight_at(each));
            require(router, "the router needs memory");
            add_experts(s, plan);
          },
          nb::arg("router"), nb::arg("gate_up"), nb::arg("down"), nb::arg("width"),
          nb::arg("num_chosen"), nb::arg("norm_topk"), nb::arg("activation"),
          nb::arg("router_bias") = 0, nb::arg("correction") = 0, nb::arg("sigmoid") = false,
          nb::arg("factor") = 1.0f)
      .def(
          "add_shared_expert",
          [](Segment& s, uintptr_t router, int width) {
            add_shared_expert(s, floats(router), width);
          },
          nb::arg("router"), nb::arg("width"))
      .def("run_step", &run_step, nb::arg("frame"), nb::arg("plans"), nb::arg("num_threads"))
      .def(
          "run_step",
          [](const Segment& s, Frame& frame, const AttentionPlan& plan, int num_threads) {
            run_step(s, frame, {&plan}, num_threads);
          },
          nb::arg("frame"), nb::arg("plan"), nb::arg("num_threads"))
      .def("run", &run, nb::arg("frame"), nb::arg("attended"), nb::arg("heads"),
           nb::arg("num_threads"));
}

}  // namespace ridgeline
