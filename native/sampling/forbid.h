// Forbids tokens in a row of logits, from one bit per token.
#pragma once
#include <stdint.h>

namespace ridgeline {

// Sets x[i] to minus infinity where bit i % 32 of words[i / 32] is 0, and leaves the rest as it is.
void forbid_tokens(float* x, int64_t width, const uint32_t* words);

}  // namespace ridgeline
