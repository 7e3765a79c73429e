// How multiply_loops.h writes instructions: as assembly with a read-write operand, because
// compilers spill sums around the intrinsics, and fold loops. native/tests/emulation has a twin of
// this file that uses the intrinsics.
#pragma once
#include <immintrin.h>

#define RL_TARGET(features) __attribute__((target(features)))
// sum = instruction(sum, x, y).
#define RL_ACCUMULATE(assembly, intrinsic, sum, x, y) \
  asm volatile(assembly " %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y))
// sum += x * y.
#define RL_FMA RL_ACCUMULATE
// to = instruction(x, y).
#define RL_COMPUTE(assembly, intrinsic, to, x, y) \
  asm volatile(assembly " %2, %1, %0" : "=v"(to) : "v"(x), "v"(y))
// Whether the loops on AMX tiles are compiled.
#define RL_HAS_TILE_LOOPS 1
