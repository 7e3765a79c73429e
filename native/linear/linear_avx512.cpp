#include "linear/engines_avx512.h"
#include "linear/kernels.h"

namespace ridgeline {

const LinearOps& linear_ops_avx512() {
  static const LinearOps ops = Kernels<Avx512>::ops<quantise_block>("avx512");
  return ops;
}

}  // namespace ridgeline
