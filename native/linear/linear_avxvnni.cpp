#include "linear/engines_avx2.h"
#include "linear/kernels.h"

namespace ridgeline {

const LinearOps& linear_ops_avxvnni() {
  static const LinearOps ops = Kernels<AvxVnni>::ops<quantise_block>("avxvnni");
  return ops;
}

}  // namespace ridgeline
