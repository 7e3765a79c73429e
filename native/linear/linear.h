// y[M, N] = x[M, K] * W[N, K]^T (+ bias). Weights have 4 or 8 bits, and rows of x are quantised on
// the way in; or they are bfloat16 or float32, and rows stay floats.
//
// Legend: M rows, K inputs, N outputs. A panel is 16 outputs; a block is 32 inputs (16 where groups
// are of 16); a group is the inputs that share one scale; a line is 64 bytes of packed weights.
//
// WEIGHT LAYOUT. Panels one after another. In each, K (zero-padded to whole blocks and groups) is
// cut into lines:
//   int4  A line is 16 outputs x 8 inputs. Byte 4*o + j holds input j in its low nibble and input
//         4 + j in its high one, as q in 0..15. The weight is (q - zero) * scale, where zero is 8
//         if there are no zeros; with minima it is q * scale + min.
//   int8  A line is 16 outputs x 4 inputs. Byte 4*o + j holds q + 128, q in -127..127. The weight
//   is
//         q * scale.
//   int8_groups  Lines as for int8, q from -128. The weight is q * scale, or q * scale + min.
//   int8_sparse24  int8 of which two of every four inputs are stored: a block of 8 lines of int8
//         takes 5, kSparseBlockBytes. First a bit for each byte of the 8 lines, 64 to a line of
//         int8, set where the byte is stored; then 32 bytes for each line, the stored ones in
//         order. All other weights are zero.
//   bf16  A line is 16 outputs x 2 inputs; 16-bit word 2*o + j is the weight.
//   fp32  A line is 16 outputs x 1 input; float o is the weight.
// int4 and int8_groups have scales (fp16 [panels][spans][16]), optional minima of the same shape,
// optional int4 zeros (u8 [panels][groups][16]) and a factor per output, a power of two that keeps
// every scale a normal fp16 number. int8 and int8_sparse24 have only the factor: it is the scale.
// A span is one group; or, where there are steps (s8 [panels][groups][16]), several, and the scale
// of a group is scale * step, its minimum min * min_step. (These are the scales of scales of
// GGUF's K-quants; exact in float32.)
//
// ROW LAYOUT (QuantRows; floats likewise). Blocks of 32 inputs, in each all rows:
// values[block][row][32], so that a tile of rows reads one contiguous piece per block. Blocks have
// 16 inputs where groups do, and 64 where the variant wants that (LinearOps::max_block) and groups
// are multiples of 64. scales[group][row] and sums[group][row] (sums of the values) go with them.
// Rows for AMX products of bfloat16 are laid out as amx/bf16x3.h describes. The producer of rows
// (a fused RMSNorm, SiLU * up, ...) computes them in float32, passes each through
// LinearOps::quantise, and hands the QuantRows to every linear that reads this input.
//
// REDUCTION ORDER. It makes a row's result bitwise independent of the other rows, of its place
// among them, of the number of threads and of the ISA:
//   int4, int8_groups  Per group an exact int32 sum. Then, groups ascending from y = 0:
//         y = fma(float(sum), scale_w * scale_x, y), and with minima
//         y = fma(min, float(sum_x) * scale_x, y). At the end y * factor + bias, rounded twice.
//   int8, int8_sparse24  One exact int32 sum; y = float(sum) * (factor * scale_x); then + bias.
//   bf16, fp32  y = fma(x_k, w_k, y), k ascending from y = 0; then + bias. A weight that bfloat16
//         holds exactly gives the same bits in both. The exception is bf16 on AMX: its products are
//         exact as well but summed in the tiles' own order (amx/bf16x3.h), which does not depend on
//         rows or threads either.
// Integer sums are exact in any order. Rows and outputs are never reduced over.
//
// DIGITS. A row may be multiplied in more than 8 bits: for weights in integers with `digits` D,
// each row x becomes D quantised rows, its digits. The first is x quantised as above; each further
// one is what those before leave, x - value * scale (exact in float32), quantised with scales of
// its own. Two digits leave at most 1 / 240^2 of a group's largest value (int8: 1 / 254^2); three
// leave 1 / 240^3 = 2^-23.7, about what float32 rounds off. The digits of row r are rows r * D .. r
// * D + D - 1, and the result is ((y of digit 2 + y of digit 1) + y of digit 0) + bias.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ridgeline {

constexpr int kPanel = 16, kBlock = 32, kLineBytes = 64;
constexpr int kSparseLines = 8;  // of int8, in a block of int8_sparse24
constexpr int kSparseMaskBytes = 8 * kSparseLines;
constexpr int kSparseBlockBytes = kSparseMaskBytes + kSparseLines * kLineBytes / 2;
constexpr int kMaxInputs = 1 << 16;  // 65536 * 255 * 127 < 2^31
constexpr int kMaxZero = 128;        // int4: so that a weight minus its zero is a signed byte
constexpr int kMaxInt4Value = 120;   // see max_row_value
constexpr int kMaxDigits = 3;

// 1.5 * 2^23: integers below 2^22 in size that are added to it stay exact.
constexpr float kIntegerOffset = 12582912.0f;

enum class WeightKind { kInt4, kInt8, kBf16, kFp32, kInt8Groups, kInt8Sparse24 };

// Whether scales belong to groups of inputs rather than to outputs.
inline bool has_groups(WeightKind kind) {
  return kind == WeightKind::kInt4 || kind == WeightKind::kInt8Groups;
}

// Whether rows stay floats; then neither rows nor weights have scales.
inline bool takes_floats(WeightKind kind) {
  return kind == WeightKind::kBf16 || kind == WeightKind::kFp32;
}

// The largest magnitude of a quantised row. For int4 it leaves room in a byte for the sum of a
// row's value and a nibble (int4_winograd.h).
inline int max_row_value(WeightKind kind) {
  return kind == WeightKind::kInt4 ? kMaxInt4Value : 127;
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Inputs per block of the row layout, at most `max_block`: 32, 64, or a whole group of 16.
inline int block_of(int group, int max_block) {
  return group < kBlock ? group : group % max_block ? kBlock : max_block;
}

struct PackedWeight {
  WeightKind kind;
  const uint8_t* lines;    // 64-byte aligned
  const uint16_t* scales;  // fp16 [panels][spans][16]; only with groups
  const uint8_t* zeros;    // [panels][groups][16]; int4 only, or null
  const float* factors;    // [panels * 16]; null for bf16 and fp32
  const float* bias;       // [N] or null
  int num_out, num_in,
      group;                // group: a multiple of 32 (int8_groups: or 16); else the padded num_in
  const uint16_t* mins;     // fp16 [panels][spans][16], or null
  const int8_t* steps;      // [panels][groups][16], or null: a span is then a group
  const int8_t* min_steps;  // null unless there are both steps and mins
  int span;                 // inputs, a multiple of the group; 0 without steps
  int digits = 1;           // of each row: see DIGITS

  int padded_in() const { return static_cast<int>(round_up(num_in, group)); }
  int num_panels() const { return static_cast<int>(round_up(num_out, kPanel) / kPanel); }
  int num_groups() const { return padded_in() / group; }
  int groups_per_span() const { return span ? span / group : 1; }
  int num_spans() const {
    return static_cast<int>(round_up(num_groups(), groups_per_span()) / groups_per_span());
  }
  int bits() const {
    switch (kind) {
      case WeightKind::kInt4: return 4;
      case WeightKind::kInt8Sparse24: return 5;
      case WeightKind::kBf16: return 16;
      case WeightKind::kFp32: return 32;
      default: return 8;
    }
  }
  int64_t panel_bytes() const { return static_cast<int64_t>(padded_in()) * kPanel * bits() / 8; }
};

// Rows as int8 with a scale per row and group: x = value * scale, |value| <= max_value.
struct QuantRows {
  int8_t* values;  // [padded_in / block][num_rows][block], block_of the ops that multiply them
  float* scales;   // [groups][num_rows]
  int32_t* sums;   // [groups][num_rows]
  int num_rows, num_in, group;
  int max_value;                  // max_row_value of the weights they meet
  float* pair_offsets = nullptr;  // [groups][num_rows] where rows are in Winograd pairs, else null

  int padded_in() const { return static_cast<int>(round_up(num_in, group)); }
  int num_groups() const { return padded_in() / group; }
};

struct LinearArgs {
  PackedWeight weight;
  const void* x;        // [blocks][M][32], elements of x_bytes bytes
  const float* scales;  // QuantRows::scales; null for floats
  const int32_t* sums;  // QuantRows::sums; null for floats
  float* out;           // first output of first_row; rows are out_stride floats apart
  int64_t out_stride;
  int num_rows;                         // rows in x
  int first_row, end_row;               // rows to compute
  bool read_soon = false;               // keep results in the cache, however many
  const float* pair_offsets = nullptr;  // QuantRows::pair_offsets
};

// Panels first .. end - 1 of a weight, as a weight.
PackedWeight panels_of(const PackedWeight& weight, int first, int end);

// One variant's functions. Each works on the calling thread; the caller divides panels and rows.
struct LinearOps {
  const char* isa;
  int panels_per_tile;  // divide panels among threads at multiples of this
  int max_block;        // of QuantRows::values: see block_of
  // Bytes of QuantRows::values that stay in a core's own cache while all panels pass by; 0 where it
  // does not matter, because arithmetic takes longer than reading rows again.
  int64_t cached_row_bytes;
  int block_rows;     // rows that pass one panel together: cut many rows at multiples of this
  int pair_min_rows;  // from this many rows on, int4 rows are laid out in Winograd pairs; 0: never

  // Quantises num_in floats into row `row` of `to`; row_scale > 0 fixes the scale of every group.
  void (*quantise)(const float* x, float row_scale, const QuantRows& to, int row);
  // What quantising left of row `row`'s num_in floats: see DIGITS. `rest` may be `x`.
  void (*subtract_quantised)(const float* x, const QuantRows& rows, int row, float* rest);
  // Sums `count` results of a row over its digits, which are `stride` apart; bias may be null.
  void (*sum_digits)(const float* digits, int num_digits, int64_t stride, const float* bias,
                     int count, float* out);
  // Bytes per element of LinearArgs::x: 1, 2 (int8 widened), 4 (floats) or 6 (three bfloat16).
  int (*x_bytes)(WeightKind kind);
  // Widens row `row` of QuantRows::values to two bytes per element.
  void (*widen)(const QuantRows& from, int row, int16_t* to);
  // Converts row `row` of quantised values to Winograd pairs, at the same place of `to`, which may
  // be the values themselves.
  void (*pair)(const QuantRows& rows, int row, int8_t* to);
  // Lays out row `row` of num_rows float rows as x_bytes says.
  void (*arrange)(WeightKind kind, const float* x, int num_in, int row, int num_rows, void* to);
  void (*multiply)(const LinearArgs& args, int first_panel, int end_panel);
};

const LinearOps& linear_ops_portable();
#if defined(__x86_64__)
const LinearOps& linear_ops_avx2();
const LinearOps& linear_ops_avxvnni();
const LinearOps& linear_ops_avx512();
const LinearOps& linear_ops_avx512vnni();
const LinearOps& linear_ops_avx512pairs();
const LinearOps& linear_ops_avx512amx();
#endif

inline bool uses_pairs(const LinearOps& ops, const PackedWeight& weight, int num_rows) {
  return ops.pair_min_rows && weight.kind == WeightKind::kInt4 && num_rows >= ops.pair_min_rows;
}

// Whole products on up to num_threads threads, fewer where the product is small. The group of
// `rows` must be the weight's.
void quantise_rows(const LinearOps& ops, const float* x, int64_t x_stride, float row_scale,
                   const QuantRows& to, int num_threads);
void linear_quantised(const LinearOps& ops, const PackedWeight& weight, const QuantRows& rows,
                      float* out, int64_t out_stride, int num_threads);
// Rows in several digits, quantised here.
void linear_digits(const LinearOps& ops, const PackedWeight& weight, const float* x,
                   int64_t x_stride, int num_rows, float* out, int64_t out_stride, int num_threads);
void linear_float(const LinearOps& ops, const PackedWeight& weight, const float* x,
                  int64_t x_stride, int num_rows, float* out, int64_t out_stride, int num_threads);

// Panels first .. end - 1 times rows of several digits. `args` counts rows without digits, except
// num_rows, which counts what is in x. `scratch` has digit_floats floats.
void multiply_digits(const LinearOps& ops, const LinearArgs& args, int first_panel, int end_panel,
                     float* scratch);
constexpr int kDigitRows = 128;  // rows multiplied at once
inline int64_t digit_floats(const PackedWeight& weight, int num_rows, int num_panels) {
  return int64_t{num_rows < kDigitRows ? num_rows : kDigitRows} * weight.digits * num_panels *
         kPanel;
}
// Quantises row `row` into its digits. `rest` has num_in floats; it may be null with one digit.
void quantise_digits(const LinearOps& ops, const QuantRows& to, int digits, const float* x, int row,
                     float* rest);

// Packs `q` [N, K] into `lines`, which has num_panels * panel_bytes bytes. `q` holds 0..15 for int4
// (one per byte), -127..127 for int8 and int8_sparse24, bfloat16 words for bf16, floats for fp32.
// Padding is written as weights of value zero. int8_sparse24 needs is_two_of_four.
void pack_lines(const PackedWeight& shape, const void* q, uint8_t* lines);
// Whether at most two of every four adjacent inputs are not zero.
bool is_two_of_four(const int8_t* q, int num_out, int num_in);
// One row of the weight as floats: an embedding lookup.
void unpack_row(const PackedWeight& weight, int row, float* to);

}  // namespace ridgeline
