// Transposes 8 rows x 4 words in vectors of 256 bits: for AVX2, and for AVX-512 eight rows at a
// time. simd/portable.h has the same functions in plain C++.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace ridgeline {
namespace {

typedef __m256i Words8;

// Four words of one row in the low half, of another row in the high half.
inline Words8 load_two_rows(const char* low, const char* high) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}
// The same of float16, widened to floats.
inline Words8 load_two_rows_f16(const char* low, const char* high) {
  const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high));
  return _mm256_castps_si256(_mm256_cvtph_ps(_mm_unpacklo_epi64(a, b)));
}

// From w[i] = words of row i (low half) and row 4 + i (high half), to w[i] = word i of all rows.
inline void transpose(Words8 (&w)[4]) {
  const __m256 a = _mm256_castsi256_ps(_mm256_unpacklo_epi32(w[0], w[1]));
  const __m256 b = _mm256_castsi256_ps(_mm256_unpackhi_epi32(w[0], w[1]));
  const __m256 c = _mm256_castsi256_ps(_mm256_unpacklo_epi32(w[2], w[3]));
  const __m256 d = _mm256_castsi256_ps(_mm256_unpackhi_epi32(w[2], w[3]));
  w[0] = _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0x44));
  w[1] = _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0xEE));
  w[2] = _mm256_castps_si256(_mm256_shuffle_ps(b, d, 0x44));
  w[3] = _mm256_castps_si256(_mm256_shuffle_ps(b, d, 0xEE));
}

inline void store_words(int32_t* to, Words8 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v);
}
inline void store_scaled(float* to, Words8 v, float by) {
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_castsi256_ps(v), _mm256_set1_ps(by)));
}
inline Words8 upper_words(Words8 v) {
  return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u)));
}
inline Words8 lower_words(Words8 v) { return _mm256_slli_epi32(v, 16); }

}  // namespace
}  // namespace ridgeline
