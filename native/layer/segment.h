// A decoder layer on the CPU, fused: embedding, RMSNorm, residual adds, rotary embedding, gating,
// packed linears and attention, run as one list of operators in one parallel region.
//
// Legend: T rows (tokens of the step), C hidden size, I intermediate size, D head dim.
//
// A SEGMENT is a list of operators over the rows of a step. Each is cut into items (rows, spans of
// a row, panels of a weight) that threads claim one by one; an operator begins when all items of
// the one before it are done. A thread that wakes late takes fewer items, so no thread waits for
// it, and no result depends on which thread took which item: every item writes its own part, and
// sums stay within an item.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/paged_kv.h"
#include "layer/row_ops.h"
#include "linear/linear.h"

namespace ridgeline {

struct FreeDeleter {
  void operator()(void* p) const;
};

// Memory that only grows, aligned to a cache line.
class GrowingBuffer {
 public:
  void* reserve(int64_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<void, FreeDeleter> memory_;
  int64_t bytes_ = 0;
};

// Memory for the rows of a product, in the form that its weight takes (see PreparedRows).
struct PreparedBuffers {
  GrowingBuffer values, scales, sums, pair_offsets, wide;
};

// What operators read and write: [T, width] floats each. kExpertRows has a row per (token, choice)
// pair.
enum Slot { kResidual, kBranch, kGateUp, kNormed, kExpertRows, kQkv, kAttended, kOut, kNumSlots };

// Table of a rotary embedding: [positions][2][rotated], cos then sin.
struct RopeTable {
  const float* table;
  int64_t num_positions;
  int rotated;
};

// Which token goes to which expert: P = T * X pairs (token t, choice k), pair t * X + k; sorted by
// expert, then by pair.
struct ExpertRouting {
  std::vector<int32_t> expert;  // [P] of each pair
  std::vector<float> weight;    // [P]
  std::vector<int32_t> sorted;  // [P] pairs in sorted order
  std::vector<int32_t> place;   // [P] each pair's index in it
  std::vector<int32_t> first;   // [E + 1] each expert's first index in it
  std::vector<int32_t> chosen;  // experts that have a pair
};

// Memory of one decoder's steps, shared by its segments; one step at a time.
struct Frame {
  int num_rows = 0;
  float* slots[kNumSlots] = {};
  GrowingBuffer own[kNumSlots];  // of the slots that are not bound from outside
  PreparedBuffers prepared;
  PreparedBuffers gated;   // rows prepared by gating, while a product still reads `prepared`
  GrowingBuffer scratch;   // per thread
  GrowingBuffer partials;  // of an attention cut into chunks
  const int64_t* tokens = nullptr;
  const int64_t* positions = nullptr;
  // A plan for each group of layers with separate block tables; empty: attention runs elsewhere,
  // between segments.
  std::vector<const AttentionPlan*> plans;
  int num_threads = 1;  // at most
  bool profiling = false;
  std::map<std::string, double> seconds;  // by operator name, where profiling
  std::vector<RopeTable> ropes;
  mutable ExpertRouting experts;  // written by the operators that route
  const LinearOps* linear = nullptr;
  const RowOps* row = nullptr;

  float* at(Slot slot, int64_t row_index, int width) const {
    return slots[slot] + row_index * width;
  }
  void reserve(Slot slot, int width);
  // The plan of a layer's group. Throws std::invalid_argument if it was not given.
  const AttentionPlan& plan_of(int group) const {
    require(static_cast<size_t>(group) < plans.size() && plans[group]->num_rows() == num_rows,
            "the step's runs were not given");
    return *plans[group];
  }
  int64_t bytes() const;
};

// Rows as a weight takes them: quantised, with as many digits as the weight has, also widened where
// the ISA multiplies 16-bit words; or, for weights of 16 or 32 bits, floats in blocks. Arguments
// that count rows next to a weight count them without digits; `rows` counts digits. Rows from
// first_row on are laid out apart from those before (see QuantRows).
struct PreparedRows {
  QuantRows rows;
  void* x;  // LinearArgs::x
  int bytes;
};
PreparedRows rows_for(const Frame& frame, const PreparedBuffers& from, const PackedWeight& weight,
                      int64_t first_row, int num_rows);
void reserve_rows(const Frame& frame, PreparedBuffers& buffers, const PackedWeight& weight,
                  int64_t num_rows);
// All rows of the frame.
PreparedRows all_rows_for(const Frame& frame, const PreparedBuffers& from,
                          const PackedWeight& weight);
void reserve_all_rows(const Frame& frame, PreparedBuffers& buffers, const PackedWeight& weight);
// Prepares groups first .. end - 1 of row `row` of `to`; `x` points at the row's first of these
// floats.
void prepare(const Frame& frame, const PackedWeight& weight, const PreparedRows& to, int row,
             const float* x, int first, int end);

// Where threads have fewer rows than one cache line of scales holds, each keeps its own scales (and
// sums and pair offsets) aside until it has all of them: otherwise threads would take the lines
// from each other with each group of each row.
class ScalesAside {
 public:
  static int floats(const PackedWeight& weight);
  ScalesAside(const Frame& frame, const PackedWeight& weight, const PreparedRows& to,
              float* memory);
  const PreparedRows& rows() const { return aside_; }
  void copy_back(int first_row, int end_row) const;

 private:
  PreparedRows to_, aside_;
  int digits_ = 1;
};

// Rows that one thread takes together, and how many such items there are.
int rows_per_item(const Frame& frame);
int64_t num_row_items(const Frame& frame);
// How many parts rows are cut into, so that a core keeps one part in its cache while all panels
// pass.
int64_t num_row_parts(const Frame& frame, const PackedWeight& weight);

// A product in chunks of panels, each for one thread: rows first_row .. end_row - 1 of `rows`;
// `out` is that of first_row.
int64_t num_chunks(const Frame& frame, const PackedWeight& weight);
void multiply(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows,
              int first_row, int end_row, float* out, int64_t chunk);
// Panels panel .. end_panel - 1 of a product, rows first .. end - 1, to `out`, whose rows are
// `stride` apart and will be read soon.
void multiply_block(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows,
                    int first, int end, int panel, int end_panel, float* out, int stride);

constexpr int kManyRows = 128;  // from this many rows on, results come back from memory
constexpr int kMaxBlockRows = 128;
// Cuts rows first .. end - 1 into blocks of at most frame.linear->block_rows rows.
struct RowBlocks {
  int first, end, num;
  RowBlocks(const Frame& frame, int first_row, int end_row)
      : first(first_row),
        end(end_row),
        num((end_row - first_row + frame.linear->block_rows - 1) / frame.linear->block_rows) {}
  int begin(int index) const {
    return first + static_cast<int>(int64_t{end - first} * index / num);
  }
};

class Op {
 public:
  virtual ~Op() = default;
  // Reserves memory. Throws std::invalid_argument for what it cannot compute.
  virtual void begin(Frame& frame) const = 0;
  virtual int64_t num_items(const Frame& frame) const = 0;
  virtual void run(const Frame& frame, int64_t item, float* scratch) const = 0;
  virtual int64_t macs() const { return 0; }       // multiply-adds per row
  virtual int64_t step_macs() const { return 0; }  // of the step begun, where they depend on it
  virtual int scratch_floats() const { return 0; }
};

class Segment {
 public:
  Segment() = default;
  Segment(const Segment&) = delete;
  void add(std::unique_ptr<Op> op);
  // The name in a profile of the operators added since the last mark.
  void mark(const std::string& name);
  // How many threads are worth waking is computed for the mean layer.
  void end_layer() { ++num_layers_; }
  // Runs on at most frame.num_threads threads, fewer where there is little to do.
  void run(Frame& frame) const;

 private:
  void work(const Frame& frame, struct StepProgress& step, int thread, float* scratch,
            double* arrived_s) const;
  void record_times(Frame& frame, const StepProgress& step, double since_s) const;
  int threads_for(const Frame& frame) const;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<std::string> names_;
  int64_t macs_ = 0;
  int num_layers_ = 0;
};

// Rows of an embedding table, bfloat16 or float32, times `scale`, to kResidual.
std::unique_ptr<Op> embed_op(const void* table, bool is_bf16, int64_t num_tokens, int width,
                             float scale);
// The same from a packed table with a row per token, unpacked as it is read.
std::unique_ptr<Op> embed_packed_op(const PackedWeight* table, float scale);

// What happens to a row on its way into a product: kResidual += [norm of] kBranch; then its norm;
// then it is prepared for `for_weight` or, where that is null, written as floats to `to`. Without
// add and norm the row is that of `from`.
struct RowPlan {
  Slot from;
  int width;
  bool add_branch;
  const float* branch_gain;  // null: the branch is added as it is
  bool norm;
  const float* gain;
  float eps;
  const PackedWeight* for_weight;
  Slot to;
  float branch_scale = 1.0f;  // multiplies the branch, after its norm
};
std::unique_ptr<Op> row_op(const RowPlan& plan);
// Multiplies the rows prepared by a row_op or, where `gated`, by gating.
std::unique_ptr<Op> linear_op(const PackedWeight* weight, Slot to, bool gated);

// activation(first half) * second half of what `weight` makes of the prepared rows, or where it is
// not `gated` activation of all of it, prepared for `for_weight`: two operators. Rows are gated by the thread that multiplied them (fuses_gate), else
// written to kGateUp and gated by the second operator.
struct GatePlan {
  const PackedWeight* weight;
  Activation activation;
  int width;
  const PackedWeight* for_weight;
  bool gated = true;
};
std::unique_ptr<Op> gate_up_op(const GatePlan& plan);
std::unique_ptr<Op> gate_op(const GatePlan& plan);

// Attention of kQkv's rows over a cache, to kAttended: two operators (attention_op.cpp). `group` is
// the index of the layer's plan.
void add_attention(Segment& segment, const PagedKv& kv, const AttentionParams& params,
                   const AttentionOps& ops, int group = 0);

// Heads of kQkv: q and k of each token normalised (where there are gains) and rotated; k and v
// stored.
struct RopePlan {
  int num_q, num_k, num_heads, head_dim, rope;  // num_heads: q, k and v together
  const float *q_gain, *k_gain;
  float eps;
  const PagedKv* kv;  // where keys and values are stored; null: they are not
  const AttentionOps* store;
  bool norm_rows = false;    // q, and k, are each normalised as one row over all heads
  bool interleaved = false;  // dimension 2i turns with 2i + 1, not i with i + rotated / 2
  int group = 0;             // index of the layer's plan
};
std::unique_ptr<Op> rope_op(const RopePlan& plan);

// Routed experts over kNormed's rows, their sum to kBranch: seven operators (experts.cpp).
struct ExpertsPlan {
  const float* router;  // [E, C]
  std::vector<const PackedWeight*> gate_up, down;
  int width, num_chosen;
  bool norm_topk;
  Activation activation;
  // [E] each, or null: added to the router's logits; added to probabilities where experts are
  // chosen, and to nothing else.
  const float *router_bias = nullptr, *correction = nullptr;
  bool sigmoid = false;  // probabilities are sigmoids of the logits, not their softmax
  float factor = 1.0f;   // multiplies the chosen experts' weights
};
void add_experts(Segment& segment, const ExpertsPlan& plan);
// Adds the rows of an expert that every token passes through, which lie in kExpertRows, to the sum
// in kBranch. `router`, [C] or null: the sigmoid of its product with kNormed's row multiplies them.
void add_shared_expert(Segment& segment, const float* router, int width);

}  // namespace ridgeline
