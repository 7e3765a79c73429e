// The INT8 linear in plain C++: the slow twin of int8_avx2.cpp, and what any other CPU runs.
#include "int8_linear.h"

namespace ridgeline {
namespace {

template <int ROWS>
void tile(const int8_t* panel, const int16_t* q, int64_t stride, int pairs, int32_t sums[][kPanel]) {
  for (int r = 0; r < ROWS; ++r) {
    for (int n = 0; n < kPanel; ++n) sums[r][n] = 0;
    for (int p = 0; p < pairs; ++p) {
      const int32_t low = q[r * stride + 2 * p], high = q[r * stride + 2 * p + 1];
      const int8_t* w = panel + p * 2 * kPanel;
      for (int n = 0; n < kPanel; ++n) sums[r][n] += low * w[2 * n] + high * w[2 * n + 1];
    }
  }
}

}  // namespace
}  // namespace ridgeline

#define LINEAR linear_int8_portable
#include "int8_kernel.inc"
