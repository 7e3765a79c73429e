#include "layer/row_kernels.h"

namespace ridgeline {

const RowOps& row_ops_portable() {
  static const RowOps ops = RowKernels<4>::ops("portable");
  return ops;
}

}  // namespace ridgeline
