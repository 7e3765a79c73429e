#include "attention/ops.h"

namespace ridgeline {

const AttentionOps& attention_ops_avx512vnni() {
  static const AttentionOps ops = Kernels<VectorVariant<true>>::ops("avx512vnni");
  return ops;
}

}  // namespace ridgeline
