// Attention as operators of a segment: a whole step is then one segment, and threads wake once.
#include <algorithm>

#include "layer/segment.h"
#include "simd/dispatch.h"

namespace ridgeline {
namespace {

// What both operators share: a step's attention of one layer.
struct LayerAttention {
  PagedKv kv;
  AttentionParams params;
  const AttentionOps* ops;
  AttentionWork work;
  GrowingBuffer items, offsets;
  int64_t stride_row;  // of a row of kQkv, in floats
  int group;           // index of the plan

  static void* allocate(void* owner, AttentionBuffer buffer, int64_t bytes) {
    LayerAttention& self = *static_cast<LayerAttention*>(owner);
    if (buffer == AttentionBuffer::kPartials) return nullptr;  // the frame's, shared by all layers
    return (buffer == AttentionBuffer::kItems ? self.items : self.offsets).reserve(bytes);
  }
  // Slots may have moved since the work was planned: other layers may need larger ones.
  AttentionWork bind(const Frame& frame) const {
    AttentionWork w = work;
    w.args.q = frame.slots[kQkv];
    w.args.out = frame.slots[kAttended];
    w.args.q_stride_row = stride_row;
    w.args.q_stride_head = kv.head_dim;
    w.floats = frame.partials.as<float>();
    return w;
  }
};

class AttendOp : public Op {
 public:
  explicit AttendOp(std::shared_ptr<LayerAttention> layer) : layer_(std::move(layer)) {}
  void begin(Frame& frame) const override {
    const AttentionPlan& plan = frame.plan_of(layer_->group);
    plan.check(layer_->kv);
    AttentionArgs args = attention_args(plan, layer_->kv, layer_->params);
    args.num_threads = frame.num_threads;
    layer_->ops->plan(args, {layer_.get(), LayerAttention::allocate}, layer_->work);
    frame.partials.reserve(4 * layer_->work.num_floats);
    frame.reserve(kAttended, layer_->params.num_heads * layer_->kv.head_dim);
  }
  int64_t num_items(const Frame&) const override { return layer_->work.num_units; }
  int64_t step_macs() const override { return layer_->work.macs; }
  int scratch_floats() const override { return static_cast<int>(layer_->ops->scratch_bytes / 4); }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    layer_->ops->run_unit(layer_->bind(frame), static_cast<int>(item), scratch);
  }

 private:
  std::shared_ptr<LayerAttention> layer_;
};

class MergeOp : public Op {
 public:
  explicit MergeOp(std::shared_ptr<LayerAttention> layer) : layer_(std::move(layer)) {}
  void begin(Frame&) const override {}
  int64_t num_items(const Frame&) const override { return layer_->work.num_merges; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    layer_->ops->merge_item(layer_->bind(frame), static_cast<int>(item), scratch);
  }

 private:
  std::shared_ptr<LayerAttention> layer_;
};

}  // namespace

void add_attention(Segment& segment, const PagedKv& kv, const AttentionParams& params,
                   const AttentionOps& ops, int group) {
  params.check(kv);
  auto layer = std::make_shared<LayerAttention>();
  layer->kv = kv;
  layer->params = params;
  layer->ops = &ops;
  layer->group = group;
  layer->stride_row = (params.num_heads + int64_t{2} * kv.num_kv_heads) * kv.head_dim;
  segment.add(std::make_unique<AttendOp>(layer));
  segment.add(std::make_unique<MergeOp>(layer));
}

}  // namespace ridgeline
