// Twin of native/simd/avx512_bf16.h: SIMDe 0.7.4 has no such instructions.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace ridgeline {
namespace {

inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  const auto odd = [](__m512i v) {
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536)));
  };
  const auto even = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
  return _mm512_fmadd_ps(even(a), even(b), _mm512_fmadd_ps(odd(a), odd(b), sum));
}

inline __m512i to_bf16(__m512 a, __m512 b) {
  alignas(64) static constexpr int16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                     23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                     45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const auto rounded = [](__m512 x) {
    const __m512i v = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(v, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(0x7FFF)), odd);
  };
  return _mm512_permutex2var_epi16(rounded(a), _mm512_loadu_si512(kUpper), rounded(b));
}

}  // namespace
}  // namespace ridgeline
