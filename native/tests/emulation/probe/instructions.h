// Twin of native/probe/instructions.h.
#pragma once
#include <immintrin.h>

#include "simd/avx512_bf16.h"

#define RL_TARGET(features)
#define RL_ACCUMULATE(assembly, intrinsic, sum, x, y) sum = intrinsic(sum, x, y)
#define RL_FMA(assembly, intrinsic, sum, x, y) sum = intrinsic(x, y, sum)
#define RL_COMPUTE(assembly, intrinsic, to, x, y) to = intrinsic(x, y)
#define RL_HAS_TILE_LOOPS 0
