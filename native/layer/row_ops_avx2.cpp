#include "layer/row_kernels.h"

namespace ridgeline {

const RowOps& row_ops_avx2() {
  static const RowOps ops = RowKernels<8>::ops("avx2");
  return ops;
}

}  // namespace ridgeline
