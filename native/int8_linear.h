// y[M, N] = x[M, K] * W[N, K]^T with INT8 weights and activations, exact in int32: shared definitions.
//
// Weights are packed once: for each panel of kPanel outputs, for each pair of inputs (2p, 2p+1),
// kPanel x 2 bytes: (w[n][2p], w[n][2p+1]) for n in the panel. Missing outputs and inputs are zero.
// Activations are quantised per row, symmetric, to -127..127, and kept as int16 so that the
// multiply-add of neighbouring pairs (pmaddwd) is exact: no saturation at any value.
//
// int32 sums are exact, so a row's result does not depend on batching, tiling or threads.
#pragma once
#include <cstdint>

namespace ridgeline {

constexpr int kPanel = 16;
constexpr int kMaxInputs = 1 << 17;  // 131072 * 127 * 127 < 2^31

struct Int8Args {
  const float* x;  // [M, K], rows x_stride apart
  int64_t x_stride;
  const int8_t* packed;
  const float* scales;  // [N]
  const float* bias;    // [N] or null
  float* out;           // [M, N], contiguous
  float row_scale;      // activations are round(x / row_scale); 0: each row's own max|x| / 127
  int num_rows, num_out, num_in, num_threads;
};

inline int num_pairs(int num_in) { return (num_in + 1) / 2; }
inline int num_panels(int num_out) { return (num_out + kPanel - 1) / kPanel; }

void linear_int8_portable(const Int8Args& args);
#if defined(__x86_64__)
void linear_int8_avx2(const Int8Args& args);
#endif

}  // namespace ridgeline
