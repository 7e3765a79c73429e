#include "layer/row_kernels.h"

namespace ridgeline {

const RowOps& row_ops_avx512() {
  static const RowOps ops = RowKernels<16>::ops("avx512");
  return ops;
}

}  // namespace ridgeline
