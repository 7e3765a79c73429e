#include "linear/engines_avx2.h"
#include "linear/int4_maddubs.h"
#include "linear/kernels.h"

namespace ridgeline {
namespace {

void multiply(const LinearArgs& a, int first_panel, int end_panel) {
  if (a.weight.kind == WeightKind::kInt4) return multiply_int4_maddubs(a, first_panel, end_panel);
  Kernels<Avx2>::multiply(a, first_panel, end_panel);
}

LinearOps make_ops() {
  LinearOps ops = Kernels<Avx2>::ops<quantise_block>("avx2");
  ops.multiply = multiply;
  return ops;
}

}  // namespace

const LinearOps& linear_ops_avx2() {
  static const LinearOps ops = make_ops();
  return ops;
}

}  // namespace ridgeline
