#include "attention/ops.h"

namespace ridgeline {

const AttentionOps& attention_ops_avxvnni() {
  static const AttentionOps ops = Kernels<VectorVariant<true>>::ops("avxvnni");
  return ops;
}

}  // namespace ridgeline
