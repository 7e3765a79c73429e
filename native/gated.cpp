// The gate of a feed-forward layer, with the product before it: see GatedPlan.
#include <algorithm>
#include <stdexcept>

#include "isa.h"
#include "segment.h"

namespace ridgeline {
namespace {

constexpr int kMostGroup = 256;  // inputs of `for_weight`, which are outputs here

// Whether whoever multiplies also gates: where a group of what is prepared is whole panels of both halves. A row alone is not
// worth the pieces.
bool gates_at_once(const Frame& frame, const GatedPlan& plan) {
  const PackedWeight& into = *plan.for_weight;
  return frame.num_rows > 1 && has_groups(into.kind) && into.group % kPanel == 0 && into.group <= kMostGroup &&
         plan.width % into.group == 0;
}

class GatedLinearOp : public Op {
 public:
  explicit GatedLinearOp(const GatedPlan& plan) : plan_(plan), plain_(linear_op(plan.weight, kWide, false)) {}
  void begin(Frame& frame) const override {
    if (!gates_at_once(frame, plan_)) return plain_->begin(frame);
    reserve_all_rows(frame, frame.gated, *plan_.for_weight);
  }
  // Of each part of the rows, all groups of what is prepared.
  int64_t num_items(const Frame& frame) const override {
    if (!gates_at_once(frame, plan_)) return plain_->num_items(frame);
    return plan_.for_weight->num_groups() * row_parts(frame, *plan_.weight);
  }
  int64_t macs() const override { return plain_->macs(); }
  int scratch_floats() const override { return (2 * kMostBlockRows + 1) * std::min(kMostGroup, plan_.for_weight->group); }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    if (!gates_at_once(frame, plan_)) return plain_->run(frame, item, scratch);
    const int64_t groups = plan_.for_weight->num_groups(), parts = row_parts(frame, *plan_.weight), part = item / groups;
    const int first = static_cast<int>(frame.num_rows * part / parts);
    const int end = static_cast<int>(frame.num_rows * (part + 1) / parts);
    const RowBlocks blocks(frame, first, end);
    for (int b = 0; b < blocks.num; ++b)
      run_block(frame, static_cast<int>(item % groups), blocks.begin(b), blocks.begin(b + 1), scratch);
  }

 private:
  // scratch: [rows][half][group], then a row of the group.
  void run_block(const Frame& frame, int group, int first, int end, float* scratch) const {
    const PackedWeight& into = *plan_.for_weight;
    const int width = into.group;
    const PreparedRows rows = all_rows_for(frame, frame.prepared, *plan_.weight);
    for (int half = 0; half < 2; ++half) {
      const int panel = (half * plan_.width + group * width) / kPanel;
      multiply_block(frame, *plan_.weight, rows, first, end, panel, panel + width / kPanel, scratch + half * width, 2 * width);
    }
    const PreparedRows to = all_rows_for(frame, frame.gated, into);
    float* gated = scratch + int64_t{2} * kMostBlockRows * width;
    for (int row = first; row < end; ++row, scratch += 2 * width) {
      frame.row->gate(plan_.act, scratch, scratch + width, width, gated);
      prepare(frame, into, to, row, gated, group, group + 1);
    }
  }

  GatedPlan plan_;
  std::unique_ptr<Op> plain_;
};

class GateOp : public Op {
 public:
  explicit GateOp(const GatedPlan& plan) : plan_(plan) {}
  void begin(Frame& frame) const override {
    if (gates_at_once(frame, plan_)) return;
    require(frame.slots[kWide], "a slot has no memory");
    reserve_all_rows(frame, frame.gated, *plan_.for_weight);
  }
  int64_t num_items(const Frame& frame) const override {
    return gates_at_once(frame, plan_) ? 0 : row_items(frame) * spans(frame);
  }
  int scratch_floats() const override { return plan_.width; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int num = spans(frame), span = static_cast<int>(item % num), per = rows_per_item(frame);
    const int from = static_cast<int>(item / num) * per;
    for (int row = from; row < std::min(from + per, frame.num_rows); ++row) gate_row(frame, row, span, num, scratch);
  }

 private:
  // By way of scratch: written where they came from, results would go to memory and back.
  void gate_row(const Frame& frame, int row, int span, int num, float* scratch) const {
    const PackedWeight& into = *plan_.for_weight;
    const int width = plan_.width, groups = into.num_groups(), first = groups * span / num, end = groups * (span + 1) / num;
    const int start = first * into.group, stop = std::min(width, end * into.group);
    const float* gate = frame.at(kWide, row, 2 * width);
    frame.row->gate(plan_.act, gate + start, gate + width + start, stop - start, scratch);
    prepare(frame, into, all_rows_for(frame, frame.gated, into), row, scratch, first, end);
  }

  // A row alone is cut, so that both threads have a share of it.
  int spans(const Frame& frame) const {
    return frame.num_rows >= 8 ? 1 : std::min(8, plan_.for_weight->num_groups());
  }
  GatedPlan plan_;
};

}  // namespace

std::unique_ptr<Op> gated_linear_op(const GatedPlan& plan) { return std::make_unique<GatedLinearOp>(plan); }
std::unique_ptr<Op> gate_op(const GatedPlan& plan) { return std::make_unique<GateOp>(plan); }

}  // namespace ridgeline
