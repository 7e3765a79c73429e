// Spacing of prefetches in time.
#pragma once

namespace ridgeline {
namespace {

// Returns `x` unchanged, 3 * kSteps cycles later.
//
// Sapphire Rapids drops prefetches issued less than about 9 cycles apart, and the load that needs
// the line then waits for memory (docs/concepts/kernels.md). Instructions between two prefetches do
// not space them out, since a core executes out of order; so each address is made to depend on the
// one before it, through multiplications by one that the compiler cannot see through.
template <int kSteps, class T>
inline __attribute__((always_inline)) T delay(T x) {
#if defined(__x86_64__)
#pragma GCC unroll 8
  for (int i = 0; i < kSteps; ++i) asm volatile("imul $1, %0, %0" : "+r"(x));
#endif
  return x;
}

}  // namespace
}  // namespace ridgeline
