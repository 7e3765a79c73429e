// Everything of a decoder layer that is not attention, fused: embedding, RMSNorm, residual adds, rotation,
// gating, and the packed linears between them, in one parallel region from one attention to the next; with
// attention of attention.h (attend_op.cpp), the whole step in one.
//
// Legend: T rows (tokens of the step), C hidden size, I intermediate size, D head dim, R rotated dims.
//
// A SEGMENT is a list of operators over the rows of a step. Each is cut into items (rows, spans of a row,
// panels of a weight) that the threads claim one by one; an operator begins when all items of the one
// before it are done. So a thread that wakes late takes fewer items and nobody waits for it, and no result
// depends on who took which item: every item writes what is its own, and sums stay within an item.
//
// THE REDUCTION ORDER of the only sums made here: element i of a row goes to partial sum i mod 16, in
// ascending order; then the 16 are added as a tree (8 + 8, 4 + 4, 2 + 2, 1 + 1). Products and sums are
// rounded one by one (no fused multiply-add), so every ISA gives the same bits.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "linear.h"

namespace ridgeline {

enum class Activation { kSilu, kGelu, kGeluTanh };

// One ISA's functions on rows of floats.
struct RowOps {
  const char* isa;
  void (*add)(float* x, const float* y, int n);  // x += y
  float (*dot)(const float* x, const float* y, int n);
  float (*inverse_rms)(const float* x, int n, float eps);
  void (*scale)(const float* x, float by, const float* gain, int n, float* y);  // y = (x * by) * gain; no gain: 1
  void (*gate)(Activation act, const float* gate, const float* up, int n, float* y);  // y = act(gate) * up
  // x[i] * cos[i] + swapped halves of x * sin[i], for the first `rotated` of a head. sin's first half is negated.
  void (*turn)(float* x, const float* cos, const float* sin, int rotated);
  void (*widen_bf16)(const uint16_t* from, float scale, int n, float* to);
  void (*weigh)(const float* x, float largest, float temperature, int64_t n, float* y);  // e^((x-largest)/temperature)
  int64_t (*first_largest)(const float* x, int64_t n);  // lowest index of the largest; -1 where there is a NaN
};

const RowOps& row_ops_portable();
#if defined(__x86_64__)
const RowOps& row_ops_avx2();
const RowOps& row_ops_avx512();
#endif

}  // namespace ridgeline
