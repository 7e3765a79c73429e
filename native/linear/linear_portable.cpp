#include "linear/engines_portable.h"
#include "linear/kernels.h"

namespace ridgeline {

const LinearOps& linear_ops_portable() {
  static const LinearOps ops = Kernels<Portable>::ops<quantise_block>("portable");
  return ops;
}

}  // namespace ridgeline
