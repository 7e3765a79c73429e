#include "attention/bf16_dot.h"
#include "attention/ops.h"

namespace ridgeline {

const AttentionOps& attention_ops_avx512pairs() {
  static const AttentionOps ops = Kernels<VectorVariant<true, Bf16Dot>>::ops("avx512pairs");
  return ops;
}

}  // namespace ridgeline
