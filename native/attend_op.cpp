// Attention as operators of a segment: a whole step is then one segment, and threads wake once.
#include <algorithm>

#include "isa.h"
#include "segment.h"

namespace ridgeline {
namespace {

// What both operators know of a step's attention of one layer.
struct Attending {
  PagedKv kv;
  AttentionSite site;
  const AttentionOps* ops;
  AttentionWork work;
  Grown items, offsets;
  int64_t stride_row;  // of a row of kHeads, in floats

  static void* hold(void* owner, AttentionHold what, int64_t bytes) {
    Attending& self = *static_cast<Attending*>(owner);
    if (what == AttentionHold::kPartials) return nullptr;  // the frame's, shared by all layers
    return (what == AttentionHold::kItems ? self.items : self.offsets).reserve(bytes);
  }
  // Slots may have moved since the work was planned: other layers ask for more.
  AttentionWork in(const Frame& frame) const {
    AttentionWork w = work;
    w.args.q = frame.slots[kHeads];
    w.args.out = frame.slots[kAttended];
    w.args.q_stride_row = stride_row;
    w.args.q_stride_head = kv.head_dim;
    w.floats = frame.partials.as<float>();
    return w;
  }
};

class AttendOp : public Op {
 public:
  explicit AttendOp(std::shared_ptr<Attending> shared) : at_(std::move(shared)) {}
  void begin(Frame& frame) const override {
    require(frame.plan && frame.plan->num_rows() == frame.num_rows, "the step's runs were not given");
    frame.plan->check(at_->kv);
    AttentionArgs args = attention_args(*frame.plan, at_->kv, at_->site);
    args.num_threads = frame.num_threads;
    at_->ops->plan(args, {at_.get(), Attending::hold}, at_->work);
    frame.partials.reserve(4 * at_->work.num_floats);
    frame.reserve(kAttended, at_->site.num_heads * at_->kv.head_dim);
  }
  int64_t num_items(const Frame&) const override { return at_->work.num_units; }
  int64_t step_macs() const override { return at_->work.macs; }
  int scratch_floats() const override { return static_cast<int>(at_->ops->desk_bytes / 4); }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    at_->ops->run_unit(at_->in(frame), static_cast<int>(item), scratch);
  }

 private:
  std::shared_ptr<Attending> at_;
};

class MergeOp : public Op {
 public:
  explicit MergeOp(std::shared_ptr<Attending> shared) : at_(std::move(shared)) {}
  void begin(Frame&) const override {}
  int64_t num_items(const Frame&) const override { return at_->work.num_merges; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    at_->ops->merge_item(at_->in(frame), static_cast<int>(item), scratch);
  }

 private:
  std::shared_ptr<Attending> at_;
};

}  // namespace

void add_attention(Segment& segment, const PagedKv& kv, const AttentionSite& site, const AttentionOps& ops) {
  site.check(kv);
  auto shared = std::make_shared<Attending>();
  shared->kv = kv;
  shared->site = site;
  shared->ops = &ops;
  shared->stride_row = (site.num_heads + int64_t{2} * kv.num_kv_heads) * kv.head_dim;
  segment.add(std::make_unique<AttendOp>(shared));
  segment.add(std::make_unique<MergeOp>(shared));
}

}  // namespace ridgeline
