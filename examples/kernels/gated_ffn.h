// The gated half of a feed-forward layer in float32, h = silu(x G^T) * (x U^T), written five times: each
// level adds one technique of writing a kernel to those before it.
//
// Legend: M rows, K inputs, N outputs; x [M, K], G and U [N, K], h [M, N].
#pragma once

enum class Level { kPlain, kVectorised, kParallel, kTiled, kFused };

struct GatedFfn {
  const float *x, *g, *u;
  float* h;
  float *gate, *up;  // [M, N]: what is not fused is written here and read again
  int num_rows, num_in, num_out, num_threads;
};

void gated_ffn(Level level, const GatedFfn& args);
