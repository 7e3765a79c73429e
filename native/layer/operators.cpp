// The operators on rows: embedding, norms, linears, rotary embedding.
#include <string.h>

#include <algorithm>

#include "layer/segment.h"
#include "simd/dispatch.h"

namespace ridgeline {
namespace {

class EmbedOp : public Op {
 public:
  EmbedOp(const void* table, bool is_bf16, int64_t num_tokens, int width, float scale)
      : table_(table), is_bf16_(is_bf16), num_tokens_(num_tokens), width_(width), scale_(scale) {}
  void begin(Frame& frame) const override {
    require(frame.tokens, "no tokens were given");
    for (int t = 0; t < frame.num_rows; ++t)
      require(frame.tokens[t] >= 0 && frame.tokens[t] < num_tokens_,
              "a token is outside the vocabulary");
    frame.reserve(kResidual, width_);
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  void run(const Frame& frame, int64_t item, float*) const override {
    const int64_t from = frame.tokens[item] * width_;
    float* to = frame.at(kResidual, item, width_);
    if (is_bf16_)
      return frame.row->widen_bf16(static_cast<const uint16_t*>(table_) + from, scale_, width_, to);
    frame.row->scale(static_cast<const float*>(table_) + from, scale_, nullptr, width_, to);
  }

 private:
  const void* table_;
  bool is_bf16_;
  int64_t num_tokens_;
  int width_;
  float scale_;
};

class PackedEmbedOp : public Op {
 public:
  PackedEmbedOp(const PackedWeight* table, float scale) : table_(table), scale_(scale) {}
  void begin(Frame& frame) const override {
    require(frame.tokens, "no tokens were given");
    for (int t = 0; t < frame.num_rows; ++t)
      require(frame.tokens[t] >= 0 && frame.tokens[t] < table_->num_out,
              "a token is outside the vocabulary");
    frame.reserve(kResidual, table_->num_in);
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  void run(const Frame& frame, int64_t item, float*) const override {
    float* to = frame.at(kResidual, item, table_->num_in);
    unpack_row(*table_, static_cast<int>(frame.tokens[item]), to);
    for (int k = 0; k < table_->num_in; ++k) to[k] *= scale_;
  }

 private:
  const PackedWeight* table_;
  float scale_;
};

class RowOp : public Op {
 public:
  explicit RowOp(const RowPlan& plan) : plan_(plan) {}
  void begin(Frame& frame) const override {
    if (plan_.for_weight)
      reserve_all_rows(frame, frame.prepared, *plan_.for_weight);
    else if (plan_.to != kOut)
      frame.reserve(plan_.to, plan_.width);
    require(frame.slots[plan_.from] && (plan_.for_weight || frame.slots[plan_.to]),
            "a slot has no memory");
  }
  int64_t num_items(const Frame& frame) const override { return num_row_items(frame); }
  int scratch_floats() const override {
    return plan_.width + (plan_.for_weight ? ScalesAside::floats(*plan_.for_weight) : 0);
  }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int per = rows_per_item(frame), first = static_cast<int>(item) * per;
    const int end = std::min(first + per, frame.num_rows);
    if (!plan_.for_weight) {
      for (int row = first; row < end; ++row) run_row(frame, row, scratch);
      return;
    }
    const PackedWeight& weight = *plan_.for_weight;
    const ScalesAside aside(frame, weight, all_rows_for(frame, frame.prepared, weight),
                            scratch + plan_.width);
    for (int row = first; row < end; ++row)
      prepare(frame, weight, aside.rows(), row, run_row(frame, row, scratch), 0,
              weight.num_groups());
    aside.copy_back(first, end);
  }

 private:
  const float* run_row(const Frame& frame, int row_index, float* scratch) const {
    const int width = plan_.width;
    float* x = frame.at(plan_.from, row_index, width);
    if (plan_.add_branch) add_branch(frame, x, frame.at(kBranch, row_index, width), scratch);
    if (!plan_.norm) return x;
    float* to = plan_.for_weight ? scratch : frame.at(plan_.to, row_index, width);
    frame.row->scale(x, frame.row->inverse_rms(x, width, plan_.eps), plan_.gain, width, to);
    return to;
  }

  void add_branch(const Frame& frame, float* x, const float* branch, float* scratch) const {
    if (plan_.branch_gain) {
      const float by = frame.row->inverse_rms(branch, plan_.width, plan_.eps);
      frame.row->scale(branch, by, plan_.branch_gain, plan_.width, scratch);
      branch = scratch;
    }
    if (plan_.branch_scale != 1.0f) {
      frame.row->scale(branch, plan_.branch_scale, nullptr, plan_.width, scratch);
      branch = scratch;
    }
    frame.row->add(x, branch, plan_.width);
  }
  RowPlan plan_;
};

class LinearOp : public Op {
 public:
  LinearOp(const PackedWeight* weight, Slot to, bool gated)
      : weight_(weight), to_(to), gated_(gated) {}
  void begin(Frame& frame) const override {
    const bool is_bound = to_ == kOut || (to_ == kQkv && frame.plans.empty());
    if (!is_bound) frame.reserve(to_, weight_->num_out);
    require(frame.slots[to_], "a slot has no memory");
  }
  // All chunks of panels for the first part of the rows, then for the next.
  int64_t num_items(const Frame& frame) const override {
    return chunks_for(frame) * num_row_parts(frame, *weight_);
  }
  int64_t macs() const override {
    return static_cast<int64_t>(weight_->num_out) * weight_->num_in * weight_->digits;
  }
  int scratch_floats() const override { return kMaxBlockRows * kPanels * kPanel; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int64_t chunks = chunks_for(frame), parts = num_row_parts(frame, *weight_);
    const int64_t part = item / chunks;
    const int first = static_cast<int>(frame.num_rows * part / parts);
    const int end = static_cast<int>(frame.num_rows * (part + 1) / parts);
    const PreparedRows rows = all_rows_for(frame, gated_ ? frame.gated : frame.prepared, *weight_);
    if (!runs_in_blocks(frame))
      return multiply(frame, *weight_, rows, first, end, frame.at(to_, first, weight_->num_out),
                      item % chunks);
    const RowBlocks blocks(frame, first, end);
    for (int b = 0; b < blocks.num; ++b)
      run_block(frame, rows, static_cast<int>(item % chunks) * kPanels, blocks.begin(b),
                blocks.begin(b + 1), scratch);
  }

 private:
  static constexpr int kPanels = 8;
  // Results of many rows go through scratch: written one panel at a time, they would be one line of
  // each row, each line in another page. AMX variants stream them past the caches instead.
  static bool runs_in_blocks(const Frame& frame) {
    return frame.num_rows >= kManyRows && !frame.linear->cached_row_bytes;
  }
  int64_t chunks_for(const Frame& frame) const {
    return runs_in_blocks(frame) ? (weight_->num_panels() + kPanels - 1) / kPanels
                                 : num_chunks(frame, *weight_);
  }
  void run_block(const Frame& frame, const PreparedRows& rows, int panel, int first, int end,
                 float* scratch) const {
    const int end_panel = std::min(panel + kPanels, weight_->num_panels());
    const int count = std::min(end_panel * kPanel, weight_->num_out) - panel * kPanel;
    multiply_block(frame, *weight_, rows, first, end, panel, end_panel, scratch, kPanels * kPanel);
    for (int row = first; row < end; ++row, scratch += kPanels * kPanel)
      memcpy(frame.at(to_, row, weight_->num_out) + panel * kPanel, scratch,
             sizeof(float) * static_cast<size_t>(count));
  }
  const PackedWeight* weight_;
  Slot to_;
  bool gated_;
};

class RopeOp : public Op {
 public:
  explicit RopeOp(const RopePlan& plan) : plan_(plan), kv_(plan.kv ? *plan.kv : PagedKv{}) {}
  void begin(Frame& frame) const override {
    require(!plan_.kv == frame.plans.empty(), "keys are stored exactly where the step's runs are known");
    if (plan_.kv) frame.plan_of(plan_.group).check(kv_);
    require(frame.positions && static_cast<size_t>(plan_.rope) < frame.ropes.size(),
            "there are no positions, or no such rotary embedding");
    const RopeTable& rope = frame.ropes[plan_.rope];
    require(rope.rotated <= plan_.head_dim && rope.rotated % 2 == 0,
            "the rotary embedding has more dimensions than a head");
    for (int t = 0; t < frame.num_rows; ++t)
      require(frame.positions[t] >= 0 && frame.positions[t] < rope.num_positions,
              "a position is outside the rotary embedding's table");
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  void run(const Frame& frame, int64_t item, float*) const override {
    const RopeTable& rope = frame.ropes[plan_.rope];
    const float* cos = rope.table + frame.positions[item] * 2 * rope.rotated;
    float* head = frame.at(kQkv, item, plan_.num_heads * plan_.head_dim);
    if (plan_.norm_rows) {
      normalise(frame, head, plan_.q_gain, plan_.num_q * plan_.head_dim);
      normalise(frame, head + plan_.num_q * plan_.head_dim, plan_.k_gain,
                plan_.num_k * plan_.head_dim);
    }
    for (int h = 0; h < plan_.num_q + plan_.num_k; ++h, head += plan_.head_dim) {
      const float* gain = h < plan_.num_q ? plan_.q_gain : plan_.k_gain;
      if (gain && !plan_.norm_rows) normalise(frame, head, gain, plan_.head_dim);
      if (plan_.interleaved)
        rotate_interleaved(head, cos, cos + rope.rotated, rope.rotated);
      else
        frame.row->rotate(head, cos, cos + rope.rotated, rope.rotated);
    }
    if (plan_.kv) store(frame, item, head - plan_.num_k * plan_.head_dim);
  }

 private:
  void normalise(const Frame& frame, float* x, const float* gain, int size) const {
    frame.row->scale(x, frame.row->inverse_rms(x, size, plan_.eps), gain, size, x);
  }
  static void rotate_interleaved(float* x, const float* cos, const float* sin, int rotated) {
    for (int i = 0; i < rotated / 2; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] + b * sin[i];  // the first half of sin is negated
      x[2 * i + 1] = b * cos[i] + a * sin[rotated / 2 + i];
    }
  }
  void store(const Frame& frame, int64_t item, const float* keys) const {
    const AttentionPlan& plan = *frame.plans[plan_.group];
    const int64_t offset = plan.block_offset(kv_, static_cast<int>(item));
    const int32_t* within = plan.within_block.data() + item;
    for (KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      char* block = (side == KvSide::kKeys ? kv_.k : kv_.v) + offset;
      for (int h = 0; h < plan_.num_k; ++h, keys += plan_.head_dim, block += kv_.stride_head)
        plan_.store->store_rows({keys, plan_.head_dim, &block, within, 1, plan_.head_dim,
                                 kv_.block_size, kv_.kind, side});
    }
  }
  RopePlan plan_;
  PagedKv kv_;
};

}  // namespace

std::unique_ptr<Op> embed_op(const void* table, bool is_bf16, int64_t num_tokens, int width,
                             float scale) {
  return std::make_unique<EmbedOp>(table, is_bf16, num_tokens, width, scale);
}
std::unique_ptr<Op> embed_packed_op(const PackedWeight* table, float scale) {
  return std::make_unique<PackedEmbedOp>(table, scale);
}
std::unique_ptr<Op> row_op(const RowPlan& plan) { return std::make_unique<RowOp>(plan); }
std::unique_ptr<Op> linear_op(const PackedWeight* weight, Slot to, bool gated) {
  return std::make_unique<LinearOp>(weight, to, gated);
}
std::unique_ptr<Op> rope_op(const RopePlan& plan) { return std::make_unique<RopeOp>(plan); }

}  // namespace ridgeline
