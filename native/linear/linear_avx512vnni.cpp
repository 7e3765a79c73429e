#include "linear/engines_avx512.h"
#include "linear/int4_winograd.h"
#include "linear/kernels.h"
#include "linear/sparse24_avx512.h"

namespace ridgeline {
namespace {

void multiply(const LinearArgs& a, int first_panel, int end_panel) {
  if (a.pair_offsets) return multiply_int4_winograd(a, first_panel, end_panel);
  if (try_sparse24<Avx512Vnni, 0>(a, first_panel, end_panel, multiply)) return;
  Kernels<Avx512Vnni>::multiply(a, first_panel, end_panel);
}

LinearOps make_ops(const char* name) {
  LinearOps ops = Kernels<Avx512Vnni>::ops<quantise_block>(name);
  ops.multiply = multiply;
  return ops;
}

LinearOps make_winograd_ops() {
  LinearOps ops = make_ops("avx512pairs");
  ops.pair_min_rows = kWinogradMinRows;
  ops.pair = pair_row;
  return ops;
}

}  // namespace

const LinearOps& linear_ops_avx512vnni() {
  static const LinearOps ops = make_ops("avx512vnni");
  return ops;
}

const LinearOps& linear_ops_avx512pairs() {
  static const LinearOps ops = make_winograd_ops();
  return ops;
}

}  // namespace ridgeline
