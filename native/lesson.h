// The four techniques of writing a kernel, one by one, on one operator: h = silu(x G^T) * (x U^T), the gated
// half of a feed-forward, in float32. A lesson (docs/concepts/kernels.md); the engine computes it elsewhere.
//
// Legend: M rows, K inputs, N outputs; x [M, K], g and u [N, K], h [M, N].
#pragma once

namespace ridgeline {

// Each level has the techniques of those before it.
enum class Lesson { kPlain, kVectorised, kParallel, kTiled, kFused };

struct LessonArgs {
  const float *x, *g, *u;
  float *h, *gate, *up;  // gate and up [M, N]: what is not fused is written and read again
  int num_rows, num_in, num_out, num_threads;
};

void lesson_portable(Lesson level, const LessonArgs& args);
#if defined(__x86_64__)
void lesson_avx2(Lesson level, const LessonArgs& args);
void lesson_avx512(Lesson level, const LessonArgs& args);
#endif

}  // namespace ridgeline
