#include "attention/ops.h"

namespace ridgeline {

const AttentionOps& attention_ops_avx512() {
  static const AttentionOps ops = Kernels<VectorVariant<false>>::ops("avx512");
  return ops;
}

}  // namespace ridgeline
