// Functions on rows of floats: everything in a decoder layer that is neither attention nor a
// product, for the operators of segment.h.
//
// REDUCTION ORDER of the only sums made here: element i of a row goes to partial sum i mod 16, in
// ascending order; then the 16 are added as a tree (8 + 8, 4 + 4, 2 + 2, 1 + 1). Products and sums
// are rounded one by one (no fused multiply-add), so every ISA gives the same bits.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace ridgeline {

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu2, kClampedSwiglu };

// One ISA's functions.
struct RowOps {
  const char* isa;
  void (*add)(float* x, const float* y, int n);  // x += y
  float (*dot)(const float* x, const float* y, int n);
  float (*inverse_rms)(const float* x, int n, float eps);
  // y = (x * by) * gain; without gain y = x * by.
  void (*scale)(const float* x, float by, const float* gain, int n, float* y);
  // y = activation(gate) * up. kClampedSwiglu (gpt-oss) bounds both by 7 first, and is
  // gate * sigmoid(1.702 * gate) * (up + 1).
  void (*gate)(Activation activation, const float* gate, const float* up, int n, float* y);
  // Rotary embedding of the first `rotated` numbers of a head: x[i] * cos[i] + swapped halves of
  // x * sin[i], where sin's first half is negated.
  void (*rotate)(float* x, const float* cos, const float* sin, int rotated);
  void (*widen_bf16)(const uint16_t* from, float scale, int n, float* to);
  // y = e^((x - largest) / temperature).
  void (*softmax_weights)(const float* x, float largest, float temperature, int64_t n, float* y);
  // The lowest index of the largest; -1 if there is a NaN.
  int64_t (*argmax)(const float* x, int64_t n);
};

const RowOps& row_ops_portable();
#if defined(__x86_64__)
const RowOps& row_ops_avx2();
const RowOps& row_ops_avx512();
#endif

}  // namespace ridgeline
