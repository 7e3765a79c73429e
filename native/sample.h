// Drawing a token from one row of logits: min-p, top-k and top-p without sorting the vocabulary.
//
// The order of tokens is (logit falling, id rising). Logits fall into buckets of equal width below the
// largest, so buckets stand in that order too: only the bucket in which the cut lies is ever sorted. Masses
// are sums of float32 weights in double. The draw walks the kept tokens by id.
#pragma once
#include <stdint.h>

#include "fused.h"

namespace ridgeline {

// As ridgeline.records.Sampling names them; top_k <= 0 and top_p >= 1 keep all; `number` in [0, 1).
struct DrawArgs {
  double temperature, min_p;
  int64_t top_k;
  double top_p, number;
};

// The token; -1 where none can be chosen (a NaN, or a largest that is not finite).
int64_t draw_token(const RowOps& ops, const float* x, int64_t width, const DrawArgs& args);

}  // namespace ridgeline
