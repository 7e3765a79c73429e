// The operators of a segment, and the threads that run them.
#include "segment.h"

#include <omp.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <stdexcept>

#include "isa.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ridgeline {

void FreeBuffer::operator()(void* p) const { std::free(p); }

void* Grown::reserve(int64_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    memory_.reset(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))));
    if (!memory_) throw std::bad_alloc();
    bytes_ = bytes;
  }
  return memory_.get();
}

void Frame::reserve(Slot slot, int width) {
  slots[slot] = static_cast<float*>(own[slot].reserve(int64_t{4} * num_rows * width));
}

int64_t Frame::bytes() const {
  int64_t sum = scratch.bytes() + partials.bytes();
  for (const Grown& each : own) sum += each.bytes();
  sum += 4 * static_cast<int64_t>(3 * experts.expert.size() + experts.weight.size());
  for (const Prepared* rows : {&prepared, &gated})
    for (const Grown* each : {&rows->values, &rows->scales, &rows->sums, &rows->pairs, &rows->wide}) sum += each->bytes();
  return sum;
}

namespace {

constexpr int kLineFloats = 16, kMostAside = 128;  // of a line; rows kept aside
constexpr int64_t kChunkBytes = 128 << 10;       // of a weight: what a thread claims at once
constexpr int64_t kThinChunkBytes = 64 << 10;    // of so few rows that beginning a chunk costs less than waiting for its end
constexpr int kThinRows = 2;
constexpr int64_t kChunksPerThread = 4, kManyRowsPanels = 64;  // of many rows
constexpr int64_t kMacsPerThread = 1 << 20;      // less than this is not worth waking a thread for
constexpr int kSpins = 4096;                     // turns of a waiting thread before it offers its core

// Tiles of panels claimed at once: enough bytes to stream, few enough that the threads end together. Where a product of many
// rows cuts them itself into parts that a core keeps (bfloat16 by tiles), more: every chunk reads all parts once more.
int64_t tiles_per_chunk(const Frame& frame, const PackedWeight& weight) {
  const bool thin = frame.num_rows * weight.digits <= kThinRows;
  const int64_t per_tile = frame.linear->panels_per_tile, bytes = thin ? kThinChunkBytes : kChunkBytes;
  const int64_t few = std::max<int64_t>(1, bytes / (weight.panel_bytes() * per_tile));
  if (frame.num_rows < kManyRows || !frame.linear->rows_kept || weight.kind != WeightKind::kBf16) return few;
  const int64_t share = weight.num_panels() / (kChunksPerThread * frame.num_threads);
  return std::max<int64_t>(few, std::min<int64_t>(kManyRowsPanels, share) / per_tile);
}

}  // namespace

// Rows that one thread takes together: prepared rows lie side by side, 32 bytes of each, so that threads with
// neighbouring rows would take every line from each other. Few are a thread's share, so that what it keeps aside is put
// once; fewer where a thread would be left without any.
int rows_per_item(const Frame& frame) {
  const int share = frame.num_rows / frame.num_threads;
  return share >= kLineFloats ? 4 : share >= 4 ? (share + 1) / 2 * 2 : 1;
}
int64_t row_items(const Frame& frame) { return (frame.num_rows + rows_per_item(frame) - 1) / rows_per_item(frame); }

// Rows that a core keeps while all panels pass by.
int64_t row_parts(const Frame& frame, const PackedWeight& weight) {
  const int64_t kept = frame.linear->rows_kept, bytes = int64_t{frame.num_rows} * weight.digits * weight.padded_in();
  return kept && !takes_floats(weight.kind) ? std::max<int64_t>(1, (bytes + kept - 1) / kept) : 1;
}

namespace {

// Rows as they lie, digits counted.
PreparedRows lying_rows(const Frame& frame, const Prepared& p, const PackedWeight& weight, int64_t first_row, int num_rows) {
  const int bytes = frame.linear->x_bytes(weight.kind);
  const int64_t at = first_row * weight.padded_in(), groups = first_row * weight.num_groups();
  if (takes_floats(weight.kind))
    return {{nullptr, nullptr, nullptr, num_rows, weight.num_in, weight.group, 0}, p.wide.as<char>() + at * bytes, bytes};
  float* const pairs = in_pairs(*frame.linear, weight, num_rows) ? p.pairs.as<float>() + groups : nullptr;
  const QuantRows rows = {p.values.as<int8_t>() + at, p.scales.as<float>() + groups, p.sums.as<int32_t>() + groups,
                          num_rows, weight.num_in, weight.group, most_value(weight.kind), pairs};
  if (bytes == 2) return {rows, p.wide.as<int16_t>() + at, bytes};
  return {rows, rows.values, bytes};
}

void reserve_lying(const Frame& frame, Prepared& p, const PackedWeight& weight, int64_t num_rows) {
  const int64_t elements = num_rows * weight.padded_in(), groups = num_rows * weight.num_groups();
  const int bytes = frame.linear->x_bytes(weight.kind);
  if (bytes != 1) p.wide.reserve(bytes * elements);
  if (takes_floats(weight.kind)) return;
  p.values.reserve(elements);
  p.scales.reserve(4 * groups);
  p.sums.reserve(4 * groups);
  if (frame.linear->pairs_from && weight.kind == WeightKind::kInt4) p.pairs.reserve(4 * groups);
}

// As how many rows the frame's lie. The same row's next inputs are so many times 32 bytes away; a power of two, as prompts like to
// have, would put all of a row, and of those multiplied with it, into the same few places of the caches. Tiles (they alone keep rows)
// cut rows into parts of their own.
int rows_apart(const Frame& frame, const PackedWeight& weight) {
  const int num = frame.num_rows * weight.digits;
  return num <= kManyRows || frame.linear->rows_kept ? num : ((num + kBlock - 1) / kBlock | 1) * kBlock;
}

// So many floats of the calling thread's own.
float* own_floats(int64_t num) {
  thread_local Grown held;
  return static_cast<float*>(held.reserve(4 * num));
}

}  // namespace

PreparedRows rows_for(const Frame& frame, const Prepared& from, const PackedWeight& weight, int64_t first_row, int num_rows) {
  return lying_rows(frame, from, weight, first_row * weight.digits, num_rows * weight.digits);
}

void reserve_rows(const Frame& frame, Prepared& of, const PackedWeight& weight, int64_t num_rows) {
  reserve_lying(frame, of, weight, num_rows * weight.digits);
}

PreparedRows all_rows_for(const Frame& frame, const Prepared& from, const PackedWeight& weight) {
  return lying_rows(frame, from, weight, 0, rows_apart(frame, weight));
}

void reserve_all_rows(const Frame& frame, Prepared& of, const PackedWeight& weight) {
  reserve_lying(frame, of, weight, rows_apart(frame, weight));
}

void prepare(const Frame& frame, const PackedWeight& weight, const PreparedRows& to, int row, const float* x, int first,
             int end) {
  const int64_t start = static_cast<int64_t>(first) * weight.group;
  const int count = static_cast<int>(std::min<int64_t>(weight.num_in, int64_t{weight.group} * end) - start);
  if (takes_floats(weight.kind))
    return frame.linear->arrange(weight.kind, x, count, row, to.rows.num_rows, static_cast<char*>(to.x) + start * to.rows.num_rows * to.bytes);
  QuantRows part = to.rows;
  const int64_t place = start * part.num_rows;
  part.values += place;
  part.scales += static_cast<int64_t>(first) * part.num_rows;
  part.sums += static_cast<int64_t>(first) * part.num_rows;
  if (part.pairs) part.pairs += static_cast<int64_t>(first) * part.num_rows;
  part.num_in = count;
  quantise_digits(*frame.linear, part, weight.digits, x, row, weight.digits > 1 ? own_floats(count) : nullptr);
  for (int lying = row * weight.digits; lying < (row + 1) * weight.digits; ++lying) {
    if (part.pairs) frame.linear->pair(part, lying, part.values);
    if (to.bytes == 2) frame.linear->widen(part, lying, static_cast<int16_t*>(to.x) + place);
  }
}

int RowsAside::floats(const PackedWeight& weight) { return has_groups(weight.kind) ? 3 * kMostAside * weight.num_groups() : 0; }

RowsAside::RowsAside(const Frame& frame, const PackedWeight& weight, const PreparedRows& to, float* memory) : to_(to), aside_(to) {
  const bool shared = frame.num_threads > 1 && frame.num_rows / frame.num_threads < kLineFloats;
  if (!has_groups(weight.kind) || !shared || frame.num_rows * weight.digits > kMostAside) return;
  digits_ = weight.digits;
  const int64_t each = int64_t{kMostAside} * weight.num_groups();
  aside_.rows.scales = memory;
  aside_.rows.sums = reinterpret_cast<int32_t*>(memory + each);
  if (to.rows.pairs) aside_.rows.pairs = memory + 2 * each;
}

void RowsAside::put(int first_row, int end_row) const {
  const QuantRows &to = to_.rows, &from = aside_.rows;
  if (to.scales == from.scales) return;
  const size_t bytes = sizeof(float) * static_cast<size_t>((end_row - first_row) * digits_);
  for (int64_t g = 0, at = first_row * digits_; g < to.num_groups(); ++g, at += to.num_rows) {
    memcpy(to.scales + at, from.scales + at, bytes);
    memcpy(to.sums + at, from.sums + at, bytes);
    if (to.pairs) memcpy(to.pairs + at, from.pairs + at, bytes);
  }
}

void multiply(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows, int first_row, int end_row,
              float* out, int64_t chunk) {
  const LinearArgs args = {weight,           rows.x,
                           rows.rows.scales, rows.rows.sums,
                           out,              weight.num_out,
                           rows.rows.num_rows, first_row, end_row, false, rows.rows.pairs};
  const int per = static_cast<int>(tiles_per_chunk(frame, weight)) * frame.linear->panels_per_tile;
  const int first = static_cast<int>(chunk) * per, end = std::min(first + per, weight.num_panels());
  if (weight.digits == 1) return frame.linear->multiply(args, first, end);
  multiply_digits(*frame.linear, args, first, end, own_floats(digit_floats(weight, end_row - first_row, end - first)));
}

void multiply_block(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows, int first, int end, int panel,
                    int end_panel, float* out, int stride) {
  const PackedWeight part = panels_of(weight, panel, end_panel);
  const LinearArgs args = {part, rows.x, rows.rows.scales, rows.rows.sums, out, stride, rows.rows.num_rows, first, end, true,
                           rows.rows.pairs};
  if (part.digits == 1) return frame.linear->multiply(args, 0, part.num_panels());
  multiply_digits(*frame.linear, args, 0, part.num_panels(), own_floats(digit_floats(part, end - first, part.num_panels())));
}

int64_t num_chunks(const Frame& frame, const PackedWeight& weight) {
  const int per_tile = frame.linear->panels_per_tile;
  const int64_t tiles = (weight.num_panels() + per_tile - 1) / per_tile, per = tiles_per_chunk(frame, weight);
  return (tiles + per - 1) / per;
}

namespace {

class EmbedOp : public Op {
 public:
  EmbedOp(const void* table, bool is_bf16, int64_t num_tokens, int width, float scale)
      : table_(table), is_bf16_(is_bf16), num_tokens_(num_tokens), width_(width), scale_(scale) {}
  void begin(Frame& frame) const override {
    require(frame.tokens, "no tokens were given");
    for (int t = 0; t < frame.num_rows; ++t)
      require(frame.tokens[t] >= 0 && frame.tokens[t] < num_tokens_, "a token is outside the vocabulary");
    frame.reserve(kResidual, width_);
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  void run(const Frame& frame, int64_t item, float*) const override {
    const int64_t from = frame.tokens[item] * width_;
    float* to = frame.at(kResidual, item, width_);
    if (is_bf16_) return frame.row->widen_bf16(static_cast<const uint16_t*>(table_) + from, scale_, width_, to);
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
      require(frame.tokens[t] >= 0 && frame.tokens[t] < table_->num_out, "a token is outside the vocabulary");
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
    if (plan_.for_weight) reserve_all_rows(frame, frame.prepared, *plan_.for_weight);
    else if (plan_.to != kOut) frame.reserve(plan_.to, plan_.width);
    require(frame.slots[plan_.from] && (plan_.for_weight || frame.slots[plan_.to]), "a slot has no memory");
  }
  int64_t num_items(const Frame& frame) const override { return row_items(frame); }
  int scratch_floats() const override { return plan_.width + (plan_.for_weight ? RowsAside::floats(*plan_.for_weight) : 0); }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int per = rows_per_item(frame), first = static_cast<int>(item) * per, end = std::min(first + per, frame.num_rows);
    if (!plan_.for_weight) {
      for (int row = first; row < end; ++row) run_row(frame, row, scratch);
      return;
    }
    const PackedWeight& weight = *plan_.for_weight;
    const RowsAside aside(frame, weight, all_rows_for(frame, frame.prepared, weight), scratch + plan_.width);
    for (int row = first; row < end; ++row) prepare(frame, weight, aside.rows(), row, run_row(frame, row, scratch), 0, weight.num_groups());
    aside.put(first, end);
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
    frame.row->add(x, branch, plan_.width);
  }
  RowPlan plan_;
};

class LinearOp : public Op {
 public:
  LinearOp(const PackedWeight* weight, Slot to, bool gated) : weight_(weight), to_(to), gated_(gated) {}
  void begin(Frame& frame) const override {
    const bool given = to_ == kOut || (to_ == kHeads && !frame.plan);
    if (!given) frame.reserve(to_, weight_->num_out);
    require(frame.slots[to_], "a slot has no memory");
  }
  // All chunks of panels of the first part of the rows, then of the next.
  int64_t num_items(const Frame& frame) const override { return chunks_for(frame) * row_parts(frame, *weight_); }
  int64_t macs() const override { return static_cast<int64_t>(weight_->num_out) * weight_->num_in * weight_->digits; }
  int scratch_floats() const override { return kMostBlockRows * kPanels * kPanel; }
  void run(const Frame& frame, int64_t item, float* scratch) const override {
    const int64_t chunks = chunks_for(frame), parts = row_parts(frame, *weight_), part = item / chunks;
    const int first = static_cast<int>(frame.num_rows * part / parts);
    const int end = static_cast<int>(frame.num_rows * (part + 1) / parts);
    const PreparedRows rows = all_rows_for(frame, gated_ ? frame.gated : frame.prepared, *weight_);
    if (!by_blocks(frame))
      return multiply(frame, *weight_, rows, first, end, frame.at(to_, first, weight_->num_out), item % chunks);
    const RowBlocks blocks(frame, first, end);
    for (int b = 0; b < blocks.num; ++b)
      run_block(frame, rows, static_cast<int>(item % chunks) * kPanels, blocks.begin(b), blocks.begin(b + 1), scratch);
  }

 private:
  static constexpr int kPanels = 8;
  // Many rows by way of scratch: results of one panel at a time are a line in each row, all of them in pages of their
  // own. Tiles go around the caches instead.
  static bool by_blocks(const Frame& frame) { return frame.num_rows >= kManyRows && !frame.linear->rows_kept; }
  int64_t chunks_for(const Frame& frame) const {
    return by_blocks(frame) ? (weight_->num_panels() + kPanels - 1) / kPanels : num_chunks(frame, *weight_);
  }
  void run_block(const Frame& frame, const PreparedRows& rows, int panel, int first, int end, float* scratch) const {
    const int end_panel = std::min(panel + kPanels, weight_->num_panels());
    const int count = std::min(end_panel * kPanel, weight_->num_out) - panel * kPanel;
    multiply_block(frame, *weight_, rows, first, end, panel, end_panel, scratch, kPanels * kPanel);
    for (int row = first; row < end; ++row, scratch += kPanels * kPanel)
      memcpy(frame.at(to_, row, weight_->num_out) + panel * kPanel, scratch, sizeof(float) * static_cast<size_t>(count));
  }
  const PackedWeight* weight_;
  Slot to_;
  bool gated_;
};

class TurnOp : public Op {
 public:
  explicit TurnOp(const TurnPlan& plan) : plan_(plan), kv_(plan.kv ? *plan.kv : PagedKv{}) {}
  void begin(Frame& frame) const override {
    require(!plan_.kv == !frame.plan, "keys are stored where the step's runs are known, and only there");
    if (plan_.kv) frame.plan->check(kv_);
    require(frame.positions && static_cast<size_t>(plan_.rope) < frame.turns.size(), "no positions or no such rope");
    const Turns& turns = frame.turns[plan_.rope];
    require(turns.rotated <= plan_.head_dim && turns.rotated % 2 == 0, "the rope turns more than a head has");
    for (int t = 0; t < frame.num_rows; ++t)
      require(frame.positions[t] >= 0 && frame.positions[t] < turns.num_positions, "a position is outside the table");
  }
  int64_t num_items(const Frame& frame) const override { return frame.num_rows; }
  void run(const Frame& frame, int64_t item, float*) const override {
    const Turns& turns = frame.turns[plan_.rope];
    const float* cos = turns.table + frame.positions[item] * 2 * turns.rotated;
    float* head = frame.at(kHeads, item, plan_.num_heads * plan_.head_dim);
    for (int h = 0; h < plan_.num_q + plan_.num_k; ++h, head += plan_.head_dim) {
      const float* gain = h < plan_.num_q ? plan_.q_gain : plan_.k_gain;
      if (gain) frame.row->scale(head, frame.row->inverse_rms(head, plan_.head_dim, plan_.eps), gain, plan_.head_dim, head);
      frame.row->turn(head, cos, cos + turns.rotated, turns.rotated);
    }
    if (plan_.kv) store(frame, item, head - plan_.num_k * plan_.head_dim);
  }

 private:
  void store(const Frame& frame, int64_t item, const float* keys) const {
    const int64_t to = frame.plan->tile(kv_, static_cast<int>(item));
    const int32_t* within = frame.plan->within_block.data() + item;
    for (KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      char* tile = (side == KvSide::kKeys ? kv_.k : kv_.v) + to;
      for (int h = 0; h < plan_.num_k; ++h, keys += plan_.head_dim, tile += kv_.stride_head)
        plan_.store->store_rows(
            {keys, plan_.head_dim, &tile, within, 1, plan_.head_dim, kv_.block_size, kv_.kind, side});
    }
  }
  TurnPlan plan_;
  PagedKv kv_;
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

struct alignas(64) Progress {
  std::atomic<int64_t> items{-1};
  alignas(64) std::atomic<int64_t> done{0};
  double finished_s = 0.0;  // where profiling: written by whoever did the last item

  // The items of the operator as whoever came first counted them: a thread that comes late might find what they
  // depend on (routed experts) already replaced by a later layer's.
  int64_t count(const Op& op, const Frame& frame) {
    int64_t known = items.load(std::memory_order_acquire);
    if (known >= 0) return known;
    const int64_t counted = op.num_items(frame);
    return items.compare_exchange_strong(known, counted, std::memory_order_acq_rel) ? counted : known;
  }

  void wait_for(int64_t num_items) const {
    for (int turn = 0; done.load(std::memory_order_acquire) < num_items; ++turn) {
      if (turn < kSpins) pause();
      else sched_yield();
    }
  }
};

// How many items of a thread's share of an operator have been taken, by it or by others.
struct alignas(64) Taken {
  std::atomic<int64_t> count{0};
};

struct Shares {
  Shares(size_t num_ops, int num_threads) : threads(num_threads), progress(num_ops), taken(num_ops * num_threads) {}
  int threads;
  std::vector<Progress> progress;
  std::vector<Taken> taken;  // [operator][thread]
};

std::unique_ptr<Op> embed_op(const void* table, bool is_bf16, int64_t num_tokens, int width, float scale) {
  return std::make_unique<EmbedOp>(table, is_bf16, num_tokens, width, scale);
}
std::unique_ptr<Op> embed_packed_op(const PackedWeight* table, float scale) {
  return std::make_unique<PackedEmbedOp>(table, scale);
}
std::unique_ptr<Op> row_op(const RowPlan& plan) { return std::make_unique<RowOp>(plan); }
std::unique_ptr<Op> linear_op(const PackedWeight* weight, Slot to, bool gated) {
  return std::make_unique<LinearOp>(weight, to, gated);
}
std::unique_ptr<Op> turn_op(const TurnPlan& plan) { return std::make_unique<TurnOp>(plan); }

void Segment::add(std::unique_ptr<Op> op) {
  macs_ += op->macs();
  ops_.push_back(std::move(op));
}

void Segment::mark(const std::string& name) { names_.resize(ops_.size(), name); }

int Segment::threads_for(const Frame& frame) const {
  int64_t macs = macs_ * frame.num_rows;
  for (const auto& op : ops_) macs += op->step_macs();
  return static_cast<int>(std::min<int64_t>(macs / std::max(1, num_layers_) / kMacsPerThread + 1, frame.num_threads));
}

// Of every operator first the thread's own share of the items, in order, so that what it asks memory for behind one of
// them is what it needs for the next; then what is left of the others'.
void Segment::work(const Frame& frame, Shares& shares, int thread, float* scratch, double* arrived_s) const {
  if (frame.profiling) *arrived_s = now_s();
  for (size_t i = 0; i < ops_.size(); ++i) {
    Progress& progress = shares.progress[i];
    const int64_t items = progress.count(*ops_[i], frame);
    int64_t mine = 0;
    for (int turn = 0; turn < shares.threads; ++turn) {
      const int whose = (thread + turn) % shares.threads;
      const int64_t begin = items * whose / shares.threads, end = items * (whose + 1) / shares.threads;
      std::atomic<int64_t>& taken = shares.taken[i * shares.threads + whose].count;
      for (int64_t item; (item = begin + taken.fetch_add(1, std::memory_order_relaxed)) < end; ++mine)
        ops_[i]->run(frame, item, scratch);
    }
    if (mine && progress.done.fetch_add(mine, std::memory_order_acq_rel) + mine == items && frame.profiling)
      progress.finished_s = now_s();
    progress.wait_for(items);
  }
}

// Each operator from the end of the one before it: by the clock of whichever thread ended it, since no thread need
// be there from the start.
void Segment::note(Frame& frame, const Shares& shares, double since_s) const {
  for (size_t i = 0; i < ops_.size(); ++i) {
    const double end_s = std::max(since_s, shares.progress[i].finished_s);
    frame.seconds[i < names_.size() ? names_[i] : ""] += end_s - since_s;
    since_s = end_s;
  }
}

void Segment::run(Frame& frame) const {
  int64_t floats = 0;
  for (const auto& op : ops_) floats = std::max<int64_t>(floats, op->scratch_floats());
  floats = round_up(floats, 16);
  for (const auto& op : ops_) op->begin(frame);
  const int threads = threads_for(frame);
  frame.scratch.reserve(4 * floats * threads);
  Shares shares(ops_.size(), threads);
  std::vector<double> arrived_s(threads, std::numeric_limits<double>::infinity());
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int thread = omp_get_thread_num();
    work(frame, shares, thread, frame.scratch.as<float>() + floats * thread, &arrived_s[thread]);
  }
  if (frame.profiling) note(frame, shares, *std::min_element(arrived_s.begin(), arrived_s.end()));
}

}  // namespace ridgeline
