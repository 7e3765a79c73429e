// Compiler hints that the kernels share.
#pragma once

// A small constant loop over registers: unrolled, so that its arrays never go through memory.
#define RL_UNROLL _Pragma("GCC unroll 32")

// An array of vectors that is handed to a function which is not inlined goes through memory.
#define RL_INLINE inline __attribute__((always_inline))

// Gives a loop its own register allocation: the registers of one stage are no use to the next.
#define RL_NOINLINE __attribute__((noinline))
