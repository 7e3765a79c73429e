#include "attention/ops.h"

namespace ridgeline {

const AttentionOps& attention_ops_portable() {
  static const AttentionOps ops = Kernels<VectorVariant<false>>::ops("portable");
  return ops;
}

}  // namespace ridgeline
