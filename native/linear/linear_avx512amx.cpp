#include "linear/amx/bf16x3.h"
#include "linear/amx/gemm.h"
#include "linear/amx/gemv.h"
#include "linear/engines_avx512.h"
#include "linear/kernels.h"
#include "linear/sparse24_avx512.h"

namespace ridgeline {
namespace {

void multiply(const LinearArgs& a, int first_panel, int end_panel);

bool multiply_by_tiles(const LinearArgs& a, int first_panel, int end_panel) {
  if (a.weight.kind == WeightKind::kInt8Sparse24)
    return try_sparse24<Avx512Amx, kGemvDelay>(a, first_panel, end_panel, multiply);
  if (a.weight.kind == WeightKind::kBf16) {
    multiply_bf16x3(a, first_panel, end_panel);
    return true;
  }
  return try_gemv(a, first_panel, end_panel) || try_gemm(a, first_panel, end_panel);
}

void multiply(const LinearArgs& a, int first_panel, int end_panel) {
  if (!multiply_by_tiles(a, first_panel, end_panel))
    Kernels<Avx512Amx>::multiply(a, first_panel, end_panel);
  // Streamed results must be visible to the threads that read them next.
  if (streams_results<Avx512Amx>(a)) _mm_sfence();
}

void arrange(WeightKind kind, const float* x, int num_in, int row, int num_rows, void* to) {
  if (kind != WeightKind::kBf16) return arrange_floats(kind, x, num_in, row, num_rows, to);
  arrange_bf16x3(x, num_in, row, num_rows, static_cast<uint8_t*>(to));
}

int x_bytes(WeightKind kind) {
  return kind == WeightKind::kBf16 ? 2 * kTerms : Kernels<Avx512Amx>::x_bytes(kind);
}

LinearOps make_ops() {
  LinearOps ops = Kernels<Avx512Amx>::ops<quantise_block>("avx512amx");
  ops.x_bytes = x_bytes;
  ops.arrange = arrange;
  ops.multiply = multiply;
  return ops;
}

}  // namespace

const LinearOps& linear_ops_avx512amx() {
  static const LinearOps ops = make_ops();
  return ops;
}

}  // namespace ridgeline
