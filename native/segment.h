// Segments: lists of operators run in one parallel region; see fused.h.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fused.h"
#include "paged.h"

namespace ridgeline {

struct FreeBuffer {
  void operator()(void* p) const;
};

// Memory that only grows, aligned to a cache line.
class Grown {
 public:
  void* reserve(int64_t bytes);
  template <class T>
  T* as() const { return static_cast<T*>(memory_.get()); }
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<void, FreeBuffer> memory_;
  int64_t bytes_ = 0;
};

// Memory for the rows of a product, in whatever form its weight takes (see PreparedRows).
struct Prepared {
  Grown values, scales, sums, pairs, wide;
};

// What an operator reads and writes: [T, width] floats, rows one after another.
enum Slot { kResidual, kBranch, kWide, kNormed, kPairs, kHeads, kAttended, kOut, kNumSlots };

struct Turns {  // one rope's table: [positions][2][rotated], cos then sin
  const float* table;
  int64_t num_positions;
  int rotated;
};

// Who goes to which expert: P = T * X pairs (token t, choice k), pair t * X + k; sorted by expert, then pair.
struct Experts {
  std::vector<int32_t> expert;   // [P] of each pair
  std::vector<float> weight;     // [P]
  std::vector<int32_t> sorted;   // [P] pairs in sorted order
  std::vector<int32_t> place;    // [P] where a pair stands in it
  std::vector<int32_t> first;    // [E + 1] of each expert, in sorted order
  std::vector<int32_t> chosen;   // experts that have a pair
};

// Memory of one decoder's steps, shared by its segments; one step at a time.
struct Frame {
  int num_rows = 0;
  float* slots[kNumSlots] = {};
  Grown own[kNumSlots];  // of the slots that are not bound from outside
  Prepared prepared;
  Prepared gated;  // what gates prepared: made while a product still reads `prepared`
  Grown scratch;  // a row per thread, or what attention works on
  Grown partials;  // of an attention cut into chunks
  const int64_t* tokens = nullptr;
  const int64_t* positions = nullptr;
  const AttentionPlan* plan = nullptr;  // null: attention is somebody else's, between segments
  int num_threads = 1;                  // at most so many
  bool profiling = false;
  std::map<std::string, double> seconds;  // by operator, where profiling
  std::vector<Turns> turns;
  mutable Experts experts;  // written by the operators that route
  const LinearOps* linear = nullptr;
  const RowOps* row = nullptr;

  float* at(Slot slot, int64_t row_index, int width) const { return slots[slot] + row_index * width; }
  void reserve(Slot slot, int width);
  int64_t bytes() const;
};

// Rows as a weight takes them: whole numbers, of as many digits as it asks for (rows are counted without them wherever a
// weight is handed over beside, and with them in `rows`), also widened where the ISA multiplies words; or, for weights of
// 16 or 32 bits, floats in blocks. Rows first_row .. are a piece of their own: see QuantRows for how they lie.
struct PreparedRows {
  QuantRows rows;
  void* x;  // LinearArgs::x
  int bytes;
};
PreparedRows rows_for(const Frame& frame, const Prepared& from, const PackedWeight& weight, int64_t first_row, int num_rows);
void reserve_rows(const Frame& frame, Prepared& of, const PackedWeight& weight, int64_t num_rows);
// All rows of the frame.
PreparedRows all_rows_for(const Frame& frame, const Prepared& from, const PackedWeight& weight);
void reserve_all_rows(const Frame& frame, Prepared& of, const PackedWeight& weight);
// Groups first .. end - 1 of row `row` of `to`, from that row's floats from the first group on.
void prepare(const Frame& frame, const PackedWeight& weight, const PreparedRows& to, int row, const float* x, int first,
             int end);
// Where threads have fewer rows than one line of scales holds, each keeps its own (and sums and pairs) aside until it has all
// of them: else it would take the lines from the others, and they from it, with each group of each row.
class RowsAside {
 public:
  static int floats(const PackedWeight& weight);
  RowsAside(const Frame& frame, const PackedWeight& weight, const PreparedRows& to, float* memory);
  const PreparedRows& rows() const { return aside_; }
  void put(int first_row, int end_row) const;

 private:
  PreparedRows to_, aside_;
  int digits_ = 1;
};
// Rows that one thread takes together, and how many such items there are.
int rows_per_item(const Frame& frame);
int64_t row_items(const Frame& frame);
// Into how many parts rows are cut, so that a core keeps one while all panels pass by.
int64_t row_parts(const Frame& frame, const PackedWeight& weight);
// A product in chunks of panels, each for one thread; of `rows`, those from first_row to end_row - 1; `out`: of first_row.
int64_t num_chunks(const Frame& frame, const PackedWeight& weight);
// Many rows: some panels of a product, first .. end - 1 of the rows, to `out`, rows `stride` apart, which is read soon.
void multiply_block(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows, int first, int end, int panel,
                    int end_panel, float* out, int stride);
constexpr int kManyRows = 128;  // results of so many have to come back from memory
constexpr int kMostBlockRows = 128;
// The `index`th of the blocks of at most frame.linear->block_rows rows into which first .. end - 1 are cut.
struct RowBlocks {
  int first, end, num;
  RowBlocks(const Frame& frame, int first_row, int end_row)
      : first(first_row), end(end_row), num((end_row - first_row + frame.linear->block_rows - 1) / frame.linear->block_rows) {}
  int begin(int index) const { return first + static_cast<int>(int64_t{end - first} * index / num); }
};
void multiply(const Frame& frame, const PackedWeight& weight, const PreparedRows& rows, int first_row, int end_row,
              float* out, int64_t chunk);

class Op {
 public:
  virtual ~Op() = default;
  virtual void begin(Frame& frame) const = 0;  // memory; refuses what it cannot compute
  virtual int64_t num_items(const Frame& frame) const = 0;
  virtual void run(const Frame& frame, int64_t item, float* scratch) const = 0;
  virtual int64_t macs() const { return 0; }  // multiply-adds per row
  virtual int64_t step_macs() const { return 0; }  // of the step that has begun, where not so many per row
  virtual int scratch_floats() const { return 0; }
};

class Segment {
 public:
  Segment() = default;
  Segment(const Segment&) = delete;
  void add(std::unique_ptr<Op> op);
  // What a profile calls the operators added since the last mark.
  void mark(const std::string& name);
  // How many threads are worth waking is asked of the mean layer.
  void end_layer() { ++num_layers_; }
  // On at most frame.num_threads threads; fewer where the work is small.
  void run(Frame& frame) const;

 private:
  void work(const Frame& frame, struct Shares& shares, int thread, float* scratch, double* arrived_s) const;
  void note(Frame& frame, const Shares& shares, double since_s) const;
  int threads_for(const Frame& frame) const;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<std::string> names_;
  int64_t macs_ = 0;
  int num_layers_ = 0;
};

// Rows of an embedding table, bfloat16 or float32, times `scale`, to kResidual.
std::unique_ptr<Op> embed_op(const void* table, bool is_bf16, int64_t num_tokens, int width, float scale);
// The same of a packed table, a row per token: unpacked as it is read.
std::unique_ptr<Op> embed_packed_op(const PackedWeight* table, float scale);

// What happens to a row on its way into a product: kResidual += [norm of] kBranch; then its norm; then to
// `for_weight`'s form, or, where that is null, as floats to `to`. Without add and norm the row is `from`'s.
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
};
std::unique_ptr<Op> row_op(const RowPlan& plan);
// Of the rows that were prepared, or, where `gated`, that a gate prepared.
std::unique_ptr<Op> linear_op(const PackedWeight* weight, Slot to, bool gated);

// act(first half) * second half of what `weight` makes of the prepared rows, to the form of `for_weight`: two operators.
// Rows are gated by whoever multiplied them (gates_at_once), else multiplied to kWide and then gated.
struct GatedPlan {
  const PackedWeight* weight;
  Activation act;
  int width;
  const PackedWeight* for_weight;
};
std::unique_ptr<Op> gated_linear_op(const GatedPlan& plan);
std::unique_ptr<Op> gate_op(const GatedPlan& plan);

// Attention of kHeads' rows over a cache, to kAttended: two operators (attend_op.cpp).
void add_attention(Segment& segment, const PagedKv& kv, const AttentionSite& site, const AttentionOps& ops);

// Heads of kHeads: q then k of each token normalised (where there are gains), then rotated; k and v then stored.
struct TurnPlan {
  int num_q, num_k, num_heads, head_dim, rope;  // num_heads: q, k and v together
  const float *q_gain, *k_gain;
  float eps;
  const PagedKv* kv;         // where keys and values are stored at once; null: they are not
  const AttentionOps* store;
};
std::unique_ptr<Op> turn_op(const TurnPlan& plan);

// Routed experts over kNormed's rows, their sum to kBranch: seven operators (experts.cpp).
struct ExpertsPlan {
  const float* router;  // [E, C]
  std::vector<const PackedWeight*> gate_up, down;
  int width, num_chosen;
  bool norm_topk;
  Activation act;
};
void add_experts(Segment& segment, const ExpertsPlan& plan);

}  // namespace ridgeline
