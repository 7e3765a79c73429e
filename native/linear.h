// y[M, N] = x[M, K] * W[N, K]^T (+ bias): weights in 4 or 8 bits, rows quantised as they come; or in
// bfloat16 or float32, rows as they are.
//
// Legend: M rows, K inputs, N outputs; panel = 16 outputs; block = 32 inputs (16 where groups are of 16);
// group = the inputs that share one scale; line = 64 bytes of packed weights.
//
// HOW WEIGHTS LIE. Panels one after another; in each, K (padded with zeros to whole blocks and groups)
// cut into lines:
//   int4  line = 16 outputs x 8 inputs.  Byte 4*o + j holds input j in its low and input 4 + j in its high
//         nibble, both as q in 0..15; the weight is (q - zero) * scale, zero = 8 where there are no zeros.
//         With minima q is from 0 and the weight q * scale + min.
//   int8  line = 16 outputs x 4 inputs.  Byte 4*o + j holds q + 128, q in -127..127; weight = q * scale.
//   int8_groups  lines of int8, q from -128; the weight is q * scale, or q * scale + min.
//   bf16  line = 16 outputs x 2 inputs.  16-bit word 2*o + j; the weight itself.
//   fp32  line = 16 outputs x 1 input.   Float o; the weight itself.
// int4 and int8_groups have scales fp16 [panels][spans][16], minima of the same shape (or none), int4 zeros u8
// [panels][groups][16] (or none), and a factor per output (a power of two, so that every scale is a normal fp16
// number). int8 has only the factor: its scale. A span is a group; or, where there are steps s8 [panels][groups][16],
// several, and the scale of a group is scale * step, its minimum min * min_step (scales of scales, as GGUF's
// K-quants have them; exact in float32).
//
// HOW ROWS LIE (QuantRows; floats in blocks of 32 alike, or, where tiles multiply bfloat16, as linear_terms.inc has them). Blocks of 32 inputs (16 where groups are of 16; 64 where the variant wants them so and a
// group is whole blocks of 64: LinearOps::most_block), in each all rows: values[block][row][32]. So a tile of rows reads one contiguous piece per block. scales[group][row] and
// sums[group][row] (of the values).
// Whoever produces rows (a fused RMSNorm, SiLU * up, ...) computes them in float32, hands each to
// LinearOps::quantise, and passes the QuantRows to every linear that reads this input.
//
// THE REDUCTION ORDER, which makes a row's result the same bits whatever the other rows, its place among
// them, the number of threads and the ISA:
//   int4, int8_groups  per group: an exact int32 sum (in pairs too); then, groups ascending, y = fma(float(sum), scale_w * scale_x,
//         y) from 0, and where there are minima y = fma(min, float(sum_x) * scale_x, y); then y * factor + bias,
//         rounded twice.
//   int8  one exact int32 sum; y = float(sum) * (factor * scale_x); then + bias.
//   bf16, fp32  y = fma(x_k, w_k, y), k ascending, from 0; then + bias: a weight that bfloat16 holds
//         exactly gives the same bits in both. But bf16 by tiles (AMX): exact products too, added up in the tiles' order
//         (linear_terms.inc), the same for any rows and threads; other variants' bits are other ones.
// Integer sums are exact in any order. Rows and outputs are never reduced over.
//
// DIGITS. Whole numbers may multiply more of a row than 8 bits of it: weights in whole numbers whose `digits` are D take each
// row x as D rows of whole numbers, its digits, quantised one after the other: the first as above, each further one
// what those before leave, x - value * scale (exact in float32). A digit has its own scales; two leave at most 1 / 240^2
// of a group's largest (int8 1 / 254^2), three 1 / 240^3 = 2^-23.7, which is about what float32 itself rounds off. Row r's
// digits lie as rows r * D .. r * D + D - 1, and its result is ((y of digit 2 + y of digit 1) + y of digit 0) + bias, each y
// as above.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ridgeline {

constexpr int kPanel = 16, kBlock = 32, kLineBytes = 64;
constexpr int kMaxInputs = 1 << 16;  // 65536 * 255 * 127 < 2^31
constexpr int kMaxZero = 128;       // int4: a weight less its zero is a signed byte
constexpr int kPairMost = 120;      // see most_value
constexpr int kMostDigits = 3;
constexpr float kPairsOffset = 12582912.0f;  // 1.5 * 2^23: what is added to it in whole numbers is exact up to 2^22

enum class WeightKind { kInt4, kInt8, kBf16, kFp32, kInt8Groups };

// Scales per group of inputs, not per output.
inline bool has_groups(WeightKind kind) { return kind == WeightKind::kInt4 || kind == WeightKind::kInt8Groups; }

// Rows stay floats, and neither has scales.
inline bool takes_floats(WeightKind kind) { return kind == WeightKind::kBf16 || kind == WeightKind::kFp32; }

// The largest magnitude of rows in whole numbers. For nibbles it leaves room in a byte for the sum of both.
inline int most_value(WeightKind kind) { return kind == WeightKind::kInt4 ? kPairMost : 127; }

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// Inputs that lie together, at most `most` of them: 32, 64, or all of a group of 16.
inline int block_of(int group, int most) { return group < kBlock ? group : group % most ? kBlock : most; }

struct PackedWeight {
  WeightKind kind;
  const uint8_t* lines;    // 64-byte aligned
  const uint16_t* scales;  // fp16 [panels][spans][16]; of groups only
  const uint8_t* zeros;    // [panels][groups][16]; int4 only, or null
  const float* factors;    // [panels * 16]; null for bf16 and fp32
  const float* bias;       // [N] or null
  int num_out, num_in, group;  // group: int4 a multiple of 32, int8_groups 16 too; others: the padded num_in
  const uint16_t* mins;    // fp16 [panels][spans][16], or null
  const int8_t* steps;     // [panels][groups][16], or null: then a span is a group
  const int8_t* min_steps; // where there are steps and mins
  int span;                // inputs: a multiple of the group; 0 where there are no steps
  int digits = 1;          // of each row: see DIGITS

  int padded_in() const { return static_cast<int>(round_up(num_in, group)); }
  int num_panels() const { return static_cast<int>(round_up(num_out, kPanel) / kPanel); }
  int num_groups() const { return padded_in() / group; }
  int groups_per_span() const { return span ? span / group : 1; }
  int num_spans() const { return static_cast<int>(round_up(num_groups(), groups_per_span()) / groups_per_span()); }
  int bits() const {
    switch (kind) {
      case WeightKind::kInt4: return 4;
      case WeightKind::kBf16: return 16;
      case WeightKind::kFp32: return 32;
      default: return 8;
    }
  }
  int64_t panel_bytes() const { return static_cast<int64_t>(padded_in()) * kPanel * bits() / 8; }
};

// Rows as int8 with a scale per row and group: x = value * scale, |value| <= most.
struct QuantRows {
  int8_t* values;  // [padded_in / block][num_rows][block], block_of the ops that multiply them
  float* scales;   // [groups][num_rows]
  int32_t* sums;   // [groups][num_rows]
  int num_rows, num_in, group;
  int most;                // most_value of the weights they meet
  float* pairs = nullptr;  // [groups][num_rows] where they lie in pairs, else null

  int padded_in() const { return static_cast<int>(round_up(num_in, group)); }
  int num_groups() const { return padded_in() / group; }
};

struct LinearArgs {
  PackedWeight weight;
  const void* x;        // [blocks][M][32] in the elements that x_bytes asks for
  const float* scales;  // QuantRows::scales; null for floats
  const int32_t* sums;  // QuantRows::sums; null for floats
  float* out;           // of first_row, its first output; rows lie out_stride apart
  int64_t out_stride;
  int num_rows;
  int first_row, end_row;  // of them, those that are computed
  bool read_soon = false;  // results stay in the cache, however many
  const float* pairs = nullptr;  // QuantRows::pairs
};

// Panels first .. end - 1 of a weight as one of their own.
PackedWeight panels_of(const PackedWeight& weight, int first, int end);

// One ISA's functions. Each works on the calling thread; whoever calls divides the panels and the rows.
struct LinearOps {
  const char* isa;
  int panels_per_tile;  // cut the panels among threads at multiples of this
  int most_block;       // of QuantRows::values: see block_of
  // Bytes of QuantRows::values that stay in a core's own cache while all panels pass by; 0: of no account, because
  // arithmetic takes longer than reading them again.
  int64_t rows_kept;
  int block_rows;  // rows that go by a panel together: cut many at multiples of this
  int pairs_from;  // so many rows for int4 and more lie in pairs; 0: never
  // Row `row` of `to`, from num_in floats; row_scale > 0 fixes the scale of every group.
  void (*quantise)(const float* x, float row_scale, const QuantRows& to, int row);
  // What row `row` as it was quantised leaves of num_in floats: see DIGITS. `rest` may be `x`.
  void (*leave)(const float* x, const QuantRows& rows, int row, float* rest);
  // `count` results of a row whose digits', the first one's first, lie `stride` apart; bias or null.
  void (*join)(const float* digits, int num_digits, int64_t stride, const float* bias, int count, float* out);
  int (*x_bytes)(WeightKind kind);  // bytes per element of LinearArgs::x: 1, 2 (int8 widened), 4 (floats) or 6 (their terms)
  // Row `row` of QuantRows::values, widened to the two bytes that x_bytes asked for.
  void (*widen)(const QuantRows& from, int row, int16_t* to);
  // Row `row` of values as `quantise` leaves them, in pairs to the same place of `to`, which may be the values.
  void (*pair)(const QuantRows& rows, int row, int8_t* to);
  // Row `row` of num_rows rows for a kind that takes floats, in blocks, as x_bytes has them.
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

inline bool in_pairs(const LinearOps& ops, const PackedWeight& weight, int num_rows) {
  return ops.pairs_from && weight.kind == WeightKind::kInt4 && num_rows >= ops.pairs_from;
}

// Whole products on num_threads threads (fewer where the product is small). `rows.group` must be the
// weight's group. Source of the ops: linear_ops(name) in isa.h.
void quantise_rows(const LinearOps& ops, const float* x, int64_t x_stride, float row_scale, const QuantRows& to,
                   int num_threads);
void linear_quantised(const LinearOps& ops, const PackedWeight& weight, const QuantRows& rows, float* out,
                      int64_t out_stride, int num_threads);
// Panels first .. end - 1 by rows of several digits: `args` counts rows without them, but for num_rows, which is how many
// lie there.
// `scratch`: digit_floats of so many rows and panels.
void multiply_digits(const LinearOps& ops, const LinearArgs& args, int first_panel, int end_panel, float* scratch);
constexpr int kDigitRows = 128;  // multiplied at once
inline int64_t digit_floats(const PackedWeight& weight, int num_rows, int num_panels) {
  return int64_t{num_rows < kDigitRows ? num_rows : kDigitRows} * weight.digits * num_panels * kPanel;
}
// The digits of row `row`, each as LinearOps::quantise leaves it; `rest`: num_in floats of the caller's, unless there is one digit.
void quantise_digits(const LinearOps& ops, const QuantRows& to, int digits, const float* x, int row, float* rest);
// Of rows in several digits, quantised here.
void linear_digits(const LinearOps& ops, const PackedWeight& weight, const float* x, int64_t x_stride, int num_rows,
                   float* out, int64_t out_stride, int num_threads);
void linear_float(const LinearOps& ops, const PackedWeight& weight, const float* x, int64_t x_stride, int num_rows,
                  float* out, int64_t out_stride, int num_threads);

// Packing. `q` is [N, K]: 0..15 for int4 (one per byte), -127..127 for int8, bfloat16 words for bf16, floats for
// fp32.
// `lines` has num_panels * panel_bytes bytes; padding is written as weights of value zero.
void pack_lines(const PackedWeight& shape, const void* q, uint8_t* lines);
// One row of the weight as floats: what an embedding lookup needs.
void unpack_row(const PackedWeight& weight, int row, float* to);

}  // namespace ridgeline
