// Draws a token from one row of logits, with min-p, top-k and top-p, without sorting the
// vocabulary.
//
// Tokens are ordered by falling logit, then by rising id. Logits are put into buckets of equal
// width below the largest, so that buckets are in that order too, and only the bucket with the cut
// is ever sorted. Masses are sums of float32 weights in double. The draw walks the kept tokens by
// id.
#pragma once
#include <stdint.h>

#include "layer/row_ops.h"

namespace ridgeline {

// Named as in ridgeline.records.Sampling. top_k <= 0 and top_p >= 1 keep all; `number` in [0, 1).
struct DrawArgs {
  double temperature, min_p;
  int64_t top_k;
  double top_p, number;
};

// The token; -1 where none can be chosen (a NaN, or a largest logit that is not finite).
int64_t draw_token(const RowOps& ops, const float* x, int64_t width, const DrawArgs& args);

}  // namespace ridgeline
