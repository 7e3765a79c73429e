// The INT8 linear on AVX2 without VNNI: weights widen to int16 in registers, pmaddwd multiplies exactly.
// (vpmaddubsw would do twice the products per instruction, but saturates at int16.)
#include <immintrin.h>
#include <string.h>

#include "int8_linear.h"

namespace ridgeline {
namespace {

inline __m256i broadcast_pair(const int16_t* q) {
  int32_t both;
  memcpy(&both, q, sizeof both);
  return _mm256_set1_epi32(both);
}

template <int ROWS>
void tile(const int8_t* panel, const int16_t* q, int64_t stride, int pairs, int32_t sums[][kPanel]) {
  __m256i low[ROWS], high[ROWS];
  for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm256_setzero_si256();
  for (int p = 0; p < pairs; ++p) {
    const __m128i* w = reinterpret_cast<const __m128i*>(panel + p * 2 * kPanel);
    const __m256i w_low = _mm256_cvtepi8_epi16(_mm_loadu_si128(w));
    const __m256i w_high = _mm256_cvtepi8_epi16(_mm_loadu_si128(w + 1));
    for (int r = 0; r < ROWS; ++r) {
      const __m256i x = broadcast_pair(q + r * stride + 2 * p);
      low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(w_low, x));
      high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(w_high, x));
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[r]), low[r]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums[r] + 8), high[r]);
  }
}

}  // namespace
}  // namespace ridgeline

#define LINEAR linear_int8_avx2
#include "int8_kernel.inc"
