// The gate of a feed-forward layer, fused with the product before it where that pays: see GatePlan.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "layer/segment.h"
#include "simd/dispatch.h"

namespace ridgeline {
namespace {

constexpr int kMaxFusedGroup = 256;  // inputs of `for_weight`, which are outputs here

// `num` ones: what an activation without a gate is multiplied by.
const float* ones(int num) {
  thread_local std::vector<float> values;
  if (static_cast<int>(values.size()) < num) values.resize(num, 1.0f);
  return values.data();
}

// Whether the thread that multiplies also gates: where a group of the prepared rows is whole panels
// of both halves. For a single row, cutting the product into groups does not pay.
bool fuses_gate(const Frame& frame, const GatePlan& plan) {
  const PackedWeight& next = *plan.for_weight;
  return plan.gated && frame.num_rows > 1 && has_groups(next.kind) && next.group % kPanel == 0 &&
         next.group <= kMaxFusedGroup && plan.width % next.group == 0;
}

class GateUpOp : public Op {
 public:
  explicit GateUpOp(const GatePlan& plan)
      : plan_(plan), linear_(linear_op(plan.weight, kGateUp, false)) {}
  void begin(Frame& frame) const override {
    if (!fuses_gate(frame, plan_)) return linear_->begin(frame);
    reserve_all_rows(frame, frame.gated, *plan_.for_weight);
  }
  // All groups of the prepared rows for the first part of the rows, then for the next.
  int64_t num_items(const Frame& frame) const override {
    if (!fuses_gate(frame, plan_)) return linear_->num_items(frame);
    return plan_.for_weight->num_groups() * num_row_parts(frame, *plan_.weight);
  }
  int64_t macs() const override { return linear_->macs(); }
  int scratch_floats() const override {
    return (2 * kMaxBlockRows + 1) * std::min(kMaxFusedGroup, plan_.for_weight->group);
  }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    if (!fuses_gate(frame, plan_)) return linear_->run(frame, item, scratch);
    const int64_t groups = plan_.for_weight->num_groups(),
                  parts = num_row_parts(frame, *plan_.weight), part = item / groups;
    const int first = static_cast<int>(frame.num_rows * part / parts);
    const int end = static_cast<int>(frame.num_rows * (part + 1) / parts);
    const RowBlocks blocks(frame, first, end);
    for (int b = 0; b < blocks.num; ++b)
      run_block(frame, static_cast<int>(item % groups), blocks.begin(b), blocks.begin(b + 1),
                scratch);
  }

 private:
  // scratch: [rows][half][group], then a row of the group.
  void run_block(const Frame& frame, int group, int first, int end, float* scratch) const {
    const PackedWeight& next = *plan_.for_weight;
    const int width = next.group;
    const PreparedRows rows = all_rows_for(frame, frame.prepared, *plan_.weight);
    for (int half = 0; half < 2; ++half) {
      const int panel = (half * plan_.width + group * width) / kPanel;
      multiply_block(frame, *plan_.weight, rows, first, end, panel, panel + width / kPanel,
                     scratch + half * width, 2 * width);
    }
    const PreparedRows to = all_rows_for(frame, frame.gated, next);
    float* gated = scratch + int64_t{2} * kMaxBlockRows * width;
    for (int row = first; row < end; ++row, scratch += 2 * width) {
      frame.row->gate(plan_.activation, scratch, scratch + width, width, gated);
      prepare(frame, next, to, row, gated, group, group + 1);
    }
  }

  GatePlan plan_;
  std::unique_ptr<Op> linear_;
};

class GateOp : public Op {
 public:
  explicit GateOp(const GatePlan& plan) : plan_(plan) {}
  void begin(Frame& frame) const override {
    if (fuses_gate(frame, plan_)) return;
    require(frame.slots[kGateUp], "a slot has no memory");
    reserve_all_rows(frame, frame.gated, *plan_.for_weight);
  }
  int64_t num_items(const Frame& frame) const override {
    return fuses_gate(frame, plan_) ? 0 : num_row_items(frame) * spans(frame);
  }
  int scratch_floats() const override { return plan_.width; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int num = spans(frame), span = static_cast<int>(item % num), per = rows_per_item(frame);
    const int from = static_cast<int>(item / num) * per;
    for (int row = from; row < std::min(from + per, frame.num_rows); ++row)
      gate_row(frame, row, span, num, scratch);
  }

 private:
  // Results go to scratch: written in place, they would go to memory and back.
  void gate_row(const Frame& frame, int row, int span, int num, float* scratch) const {
    const PackedWeight& next = *plan_.for_weight;
    const int width = plan_.width, groups = next.num_groups(), first = groups * span / num,
              end = groups * (span + 1) / num;
    const int start = first * next.group, stop = std::min(width, end * next.group);
    const float* gate = frame.at(kGateUp, row, plan_.gated ? 2 * width : width);
    const float* up = plan_.gated ? gate + width + start : ones(stop - start);
    frame.row->gate(plan_.activation, gate + start, up, stop - start, scratch);
    prepare(frame, next, all_rows_for(frame, frame.gated, next), row, scratch, first, end);
  }

  // Few rows are cut into spans, so that all threads have a share of them.
  int spans(const Frame& frame) const {
    return frame.num_rows >= 8 ? 1 : std::min(8, plan_.for_weight->num_groups());
  }
  GatePlan plan_;
};

}  // namespace

std::unique_ptr<Op> gate_up_op(const GatePlan& plan) { return std::make_unique<GateUpOp>(plan); }
std::unique_ptr<Op> gate_op(const GatePlan& plan) { return std::make_unique<GateOp>(plan); }

}  // namespace ridgeline
