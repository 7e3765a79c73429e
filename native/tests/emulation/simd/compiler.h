// Emulated, every instruction is a loop already: unrolling and inlining would only take long to
// compile.
#pragma once
#define RL_UNROLL
#define RL_INLINE inline
#define RL_NOINLINE
