#include "attention/ops.h"

namespace ridgeline {

const AttentionOps& attention_ops_avx2() {
  static const AttentionOps ops = Kernels<VectorVariant<false>>::ops("avx2");
  return ops;
}

}  // namespace ridgeline
