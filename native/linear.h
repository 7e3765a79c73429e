// y[M, N] = x[M, K] * W[N, K]^T (+ bias): weights in 4 or 8 bits, rows quantised as they come; or in
// bfloat16 or float32, rows as they are.
//
// Legend: M rows, K inputs, N outputs; panel = 16 outputs; block = 32 inputs; group = the inputs that
// share one scale; line = 64 bytes of packed weights.
//
// HOW WEIGHTS LIE. Panels one after another; in each, K (padded with zeros to whole blocks and groups)
// cut into lines:
//   int4  line = 16 outputs x 8 inputs.  Byte 4*o + j holds input j in its low and input 4 + j in its high
//         nibble, both as q in 0..15; the weight is (q - zero) * scale, zero = 8 where there are no zeros.
//   int8  line = 16 outputs x 4 inputs.  Byte 4*o + j holds q + 128, q in -127..127; weight = q * scale.
//   bf16  line = 16 outputs x 2 inputs.  16-bit word 2*o + j; the weight itself.
//   fp32  line = 16 outputs x 1 input.   Float o; the weight itself.
// int4 has scales fp16 [panels][groups][16], zeros u8 of the same shape (or none), and a factor per output
// (a power of two, so that every scale is a normal fp16 number). int8 has only the factor: its scale.
//
// HOW ROWS LIE (QuantRows). Blocks of 32 inputs, in each all rows: values[block][row][32]. So a tile of
// rows reads one contiguous piece per block. scales[group][row] and sums[group][row] (of the values).
// Whoever produces rows (a fused RMSNorm, SiLU * up, ...) computes them in float32, hands each to
// LinearOps::quantise, and passes the QuantRows to every linear that reads this input.
//
// THE REDUCTION ORDER, which makes a row's result the same bits whatever the other rows, its place among
// them, the number of threads and the ISA:
//   int4  per group: an exact int32 sum; then, groups ascending, y = fma(float(sum), scale_w * scale_x, y)
//         from 0; then y * factor + bias, rounded twice.
//   int8  one exact int32 sum; y = float(sum) * (factor * scale_x); then + bias.
//   bf16, fp32  y = fma(x_k, w_k, y), k ascending, from 0; then + bias: a weight that bfloat16 holds
//         exactly gives the same bits in both.
// Integer sums are exact in any order. Rows and outputs are never reduced over.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ridgeline {

constexpr int kPanel = 16, kBlock = 32, kLineBytes = 64;
constexpr int kMaxInputs = 1 << 16;  // 65536 * 255 * 127 < 2^31

enum class WeightKind { kInt4, kInt8, kBf16, kFp32 };

// Rows stay floats, and neither has scales.
inline bool takes_floats(WeightKind kind) { return kind == WeightKind::kBf16 || kind == WeightKind::kFp32; }

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct PackedWeight {
  WeightKind kind;
  const uint8_t* lines;    // 64-byte aligned
  const uint16_t* scales;  // fp16 [panels][groups][16]; int4 only
  const uint8_t* zeros;    // [panels][groups][16]; int4 only, or null
  const float* factors;    // [panels * 16]; null for bf16 and fp32
  const float* bias;       // [N] or null
  int num_out, num_in, group;  // group: int4 a multiple of 32; others: the padded num_in

  int padded_in() const { return static_cast<int>(round_up(num_in, group)); }
  int num_panels() const { return static_cast<int>(round_up(num_out, kPanel) / kPanel); }
  int num_groups() const { return padded_in() / group; }
  int bits() const {
    return kind == WeightKind::kInt4 ? 4 : kind == WeightKind::kInt8 ? 8 : kind == WeightKind::kBf16 ? 16 : 32;
  }
  int64_t panel_bytes() const { return static_cast<int64_t>(padded_in()) * kPanel * bits() / 8; }
};

// Rows as int8 with a scale per row and group: x = value * scale, |value| <= 127.
struct QuantRows {
  int8_t* values;  // [padded_in / 32][num_rows][32]
  float* scales;   // [groups][num_rows]
  int32_t* sums;   // [groups][num_rows]
  int num_rows, num_in, group;

  int padded_in() const { return static_cast<int>(round_up(num_in, group)); }
  int num_groups() const { return padded_in() / group; }
};

struct LinearArgs {
  PackedWeight weight;
  const void* x;        // [blocks][M][32] in the elements that x_bytes asks for
  const float* scales;  // QuantRows::scales; null for floats
  const int32_t* sums;  // QuantRows::sums; null for floats
  float* out;           // [M, N], rows out_stride apart
  int64_t out_stride;
  int num_rows;
};

// One ISA's functions. Each works on the calling thread; whoever calls divides the panels and the rows.
struct LinearOps {
  const char* isa;
  int panels_per_tile;  // cut the panels among threads at multiples of this
  // Row `row` of `to`, from num_in floats; row_scale > 0 fixes the scale of every group.
  void (*quantise)(const float* x, float row_scale, const QuantRows& to, int row);
  int (*x_bytes)(WeightKind kind);  // bytes per element of LinearArgs::x: 1, 2 (int8 widened) or 4 (floats)
  // Row `row` of QuantRows::values, widened to the two bytes that x_bytes asked for.
  void (*widen)(const QuantRows& from, int row, int16_t* to);
  // Row `row` of num_rows rows of floats, in blocks.
  void (*arrange)(const float* x, int num_in, int row, int num_rows, float* to);
  void (*multiply)(const LinearArgs& args, int first_panel, int end_panel);
};

const LinearOps& linear_ops_portable();
#if defined(__x86_64__)
const LinearOps& linear_ops_avx2();
const LinearOps& linear_ops_avxvnni();
const LinearOps& linear_ops_avx512();
const LinearOps& linear_ops_avx512vnni();
#endif

// Whole products on num_threads threads (fewer where the product is small). `rows.group` must be the
// weight's group. Source of the ops: linear_ops(name) in isa.h.
void quantise_rows(const LinearOps& ops, const float* x, int64_t x_stride, float row_scale, const QuantRows& to,
                   int num_threads);
void linear_quantised(const LinearOps& ops, const PackedWeight& weight, const QuantRows& rows, float* out,
                      int64_t out_stride, int num_threads);
void linear_float(const LinearOps& ops, const PackedWeight& weight, const float* x, int64_t x_stride, int num_rows,
                  float* out, int64_t out_stride, int num_threads);

// Packing. `q` is [N, K]: 0..15 for int4 (one per byte), -127..127 for int8, bfloat16 words for bf16, floats for
// fp32.
// `lines` has num_panels * panel_bytes bytes; padding is written as weights of value zero.
void pack_lines(const PackedWeight& shape, const void* q, uint8_t* lines);
// One row of the weight as floats: what an embedding lookup needs.
void unpack_row(const PackedWeight& weight, int row, float* to);

}  // namespace ridgeline
