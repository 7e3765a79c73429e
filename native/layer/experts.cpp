// Mixture of experts in a segment: routing, sorting, and grouped products that read only the chosen
// experts.
//
// The rows of one expert are laid out apart from the others' among the prepared rows
// (PreparedRows), so a product with them is an ordinary one; all chosen experts' panels form one
// list of items for the threads. Each pair's row is computed alone, and a token adds its experts'
// rows in the order of its own choice: other requests of the step cannot change it.
#include <algorithm>
#include <cmath>

#include "layer/segment.h"
#include "simd/dispatch.h"

namespace ridgeline {
namespace {

class RouteOp : public Op {
 public:
  explicit RouteOp(const ExpertsPlan& plan) : plan_(plan) {}
  void begin(Frame& frame) const override {
    const size_t pairs = static_cast<size_t>(frame.num_rows) * plan_.num_chosen;
    ExpertRouting& e =
        frame.experts;  // shared by all layers, which may choose more or fewer experts
    for (auto* ids : {&e.expert, &e.sorted, &e.place}) ids->resize(std::max(ids->size(), pairs));
    e.weight.resize(std::max(e.weight.size(), pairs));
    require(frame.slots[kNormed], "a slot has no memory");
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  int scratch_floats() const override { return 2 * num_experts(); }
  void run(const Frame& frame, int64_t item, float* probs) const override {
    const float* x = frame.at(kNormed, item, plan_.width);
    for (int e = 0; e < num_experts(); ++e)
      probs[e] =
          frame.row->dot(x, plan_.router + static_cast<int64_t>(e) * plan_.width, plan_.width) +
          (plan_.router_bias ? plan_.router_bias[e] : 0.0f);
    if (plan_.sigmoid)
      for (int e = 0; e < num_experts(); ++e) probs[e] = 1.0f / (1.0f + std::exp(-probs[e]));
    else
      softmax(probs);
    float* const ranks = probs + num_experts();  // of the experts, until they are chosen
    for (int e = 0; e < num_experts(); ++e)
      ranks[e] = probs[e] + (plan_.correction ? plan_.correction[e] : 0.0f);
    int32_t* expert = frame.experts.expert.data() + item * plan_.num_chosen;
    float* weight = frame.experts.weight.data() + item * plan_.num_chosen;
    float sum = 0;
    for (int k = 0; k < plan_.num_chosen; ++k) {
      const int best = static_cast<int>(std::max_element(ranks, ranks + num_experts()) - ranks);
      expert[k] = best;
      weight[k] = probs[best];
      sum += probs[best];
      ranks[best] = -INFINITY;
    }
    if (plan_.norm_topk)
      for (int k = 0; k < plan_.num_chosen; ++k) weight[k] /= sum;
    if (plan_.factor != 1.0f)
      for (int k = 0; k < plan_.num_chosen; ++k) weight[k] *= plan_.factor;
  }

 private:
  int num_experts() const { return static_cast<int>(plan_.gate_up.size()); }
  void softmax(float* x) const {
    const float top = *std::max_element(x, x + num_experts());
    float sum = 0;
    for (int e = 0; e < num_experts(); ++e) sum += x[e] = std::exp(x[e] - top);
    for (int e = 0; e < num_experts(); ++e) x[e] /= sum;
  }
  ExpertsPlan plan_;
};

class SortOp : public Op {
 public:
  SortOp(int num_experts, int num_chosen) : num_experts_(num_experts), num_chosen_(num_chosen) {}
  void begin(Frame&) const override {}
  int64_t num_items(const Frame&) const override { return 1; }
  void run(const Frame& frame, int64_t, float*) const override {
    ExpertRouting& e = frame.experts;
    const int num_pairs = frame.num_rows * num_chosen_;
    e.first.assign(static_cast<size_t>(num_experts_) + 1, 0);
    for (int pair = 0; pair < num_pairs; ++pair) e.first[e.expert[pair] + 1] += 1;
    e.chosen.clear();
    for (int i = 0; i < num_experts_; ++i) {
      if (e.first[i + 1]) e.chosen.push_back(i);
      e.first[i + 1] += e.first[i];
    }
    std::vector<int32_t> next(e.first.begin(), e.first.end() - 1);
    for (int pair = 0; pair < num_pairs; ++pair) {
      const int32_t place = next[e.expert[pair]]++;
      e.place[pair] = place;
      e.sorted[place] = pair;
    }
  }

 private:
  int num_experts_, num_chosen_;
};

PreparedRows rows_of(const Frame& frame, const PackedWeight& weight, int expert) {
  const ExpertRouting& e = frame.experts;
  return rows_for(frame, frame.prepared, weight, e.first[expert],
                  e.first[expert + 1] - e.first[expert]);
}

// Prepares pairs in sorted order, each among its expert's rows: tokens' rows, or gated ones.
class PairRowsOp : public Op {
 public:
  PairRowsOp(const ExpertsPlan& plan, bool gated) : plan_(plan), gated_(gated) {}
  void begin(Frame& frame) const override {
    reserve_rows(frame, frame.prepared, weight(), num_items(frame));
  }
  int64_t num_items(const Frame& frame) const override {
    return int64_t{frame.num_rows} * plan_.num_chosen;
  }
  int scratch_floats() const override { return gated_ ? weight().num_in : 0; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int32_t pair = frame.experts.sorted[item], expert = frame.experts.expert[pair];
    const int row = static_cast<int>(item) - frame.experts.first[expert], width = weight().num_in;
    const float* x = frame.at(kNormed, pair / plan_.num_chosen, plan_.width);
    if (gated_) {
      const float* gate = frame.at(kGateUp, item, 2 * width);
      frame.row->gate(plan_.activation, gate, gate + width, width, scratch);
      x = scratch;
    }
    prepare(frame, weight(), rows_of(frame, weight(), expert), row, x, 0, weight().num_groups());
  }

 private:
  const PackedWeight& weight() const { return gated_ ? *plan_.down[0] : *plan_.gate_up[0]; }
  ExpertsPlan plan_;
  bool gated_;
};

class ExpertLinearOp : public Op {
 public:
  ExpertLinearOp(const std::vector<const PackedWeight*>& weights, int num_chosen, Slot to)
      : weights_(weights), num_chosen_(num_chosen), to_(to) {}
  void begin(Frame& frame) const override {
    frame.reserve(to_, weights_[0]->num_out * num_chosen_);
  }
  int64_t num_items(const Frame& frame) const override {
    return static_cast<int64_t>(frame.experts.chosen.size()) * num_chunks(frame, *weights_[0]);
  }
  int64_t macs() const override {
    return int64_t{num_chosen_} * weights_[0]->num_out * weights_[0]->num_in * weights_[0]->digits;
  }
  void run(const Frame& frame, int64_t item, float*) const override {
    const int64_t chunks = num_chunks(frame, *weights_[0]);
    const int expert = frame.experts.chosen[item / chunks];
    const PackedWeight& weight = *weights_[expert];
    float* out = frame.at(to_, frame.experts.first[expert], weight.num_out);
    const PreparedRows rows = rows_of(frame, weight, expert);
    multiply(frame, weight, rows, 0, frame.experts.first[expert + 1] - frame.experts.first[expert],
             out, item % chunks);
  }

 private:
  std::vector<const PackedWeight*> weights_;
  int num_chosen_;
  Slot to_;
};

class CombineOp : public Op {
 public:
  CombineOp(int width, int num_chosen) : width_(width), num_chosen_(num_chosen) {}
  void begin(Frame& frame) const override { frame.reserve(kBranch, width_); }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  int scratch_floats() const override { return width_; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    float* to = frame.at(kBranch, item, width_);
    for (int k = 0; k < num_chosen_; ++k) {
      const int64_t pair = item * num_chosen_ + k;
      const float* from = frame.at(kExpertRows, frame.experts.place[pair], width_);
      frame.row->scale(from, frame.experts.weight[pair], nullptr, width_, k ? scratch : to);
      if (k) frame.row->add(to, scratch, width_);
    }
  }

 private:
  int width_, num_chosen_;
};

// kBranch += kExpertRows' first row of each token, times the sigmoid of its product with `router`.
class AddSharedOp : public Op {
 public:
  AddSharedOp(const float* router, int width) : router_(router), width_(width) {}
  void begin(Frame& frame) const override {
    require(frame.slots[kBranch] && frame.slots[kExpertRows] && frame.slots[kNormed],
            "a slot has no memory");
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  int scratch_floats() const override { return width_; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const float* from = frame.at(kExpertRows, item, width_);
    if (router_) {
      const float logit = frame.row->dot(frame.at(kNormed, item, width_), router_, width_);
      frame.row->scale(from, 1.0f / (1.0f + std::exp(-logit)), nullptr, width_, scratch);
      from = scratch;
    }
    frame.row->add(frame.at(kBranch, item, width_), from, width_);
  }

 private:
  const float* router_;
  int width_;
};

}  // namespace

void add_shared_expert(Segment& segment, const float* router, int width) {
  segment.add(std::make_unique<AddSharedOp>(router, width));
}

void add_experts(Segment& segment, const ExpertsPlan& plan) {
  const int num_experts = static_cast<int>(plan.gate_up.size());
  require(num_experts > 0 && plan.down.size() == plan.gate_up.size(),
          "every expert has two products");
  require(plan.num_chosen > 0 && plan.num_chosen <= num_experts,
          "more experts are chosen than there are");
  for (int e = 0; e < num_experts; ++e) {
    const PackedWeight &up = *plan.gate_up[e], &down = *plan.down[e];
    require(up.num_in == plan.width && down.num_out == plan.width &&
                up.num_out == 2 * down.num_in && up.kind == plan.gate_up[0]->kind &&
                down.kind == plan.down[0]->kind && up.digits == plan.gate_up[0]->digits &&
                down.digits == plan.down[0]->digits && up.num_out == plan.gate_up[0]->num_out &&
                up.group == plan.gate_up[0]->group && down.group == plan.down[0]->group,
            "experts must be alike");
  }
  segment.add(std::make_unique<RouteOp>(plan));
  segment.add(std::make_unique<SortOp>(num_experts, plan.num_chosen));
  segment.add(std::make_unique<PairRowsOp>(plan, false));
  segment.add(std::make_unique<ExpertLinearOp>(plan.gate_up, plan.num_chosen, kGateUp));
  segment.add(std::make_unique<PairRowsOp>(plan, true));
  segment.add(std::make_unique<ExpertLinearOp>(plan.down, plan.num_chosen, kExpertRows));
  segment.add(std::make_unique<CombineOp>(plan.width, plan.num_chosen));
}

}  // namespace ridgeline
