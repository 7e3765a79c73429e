// Vectors of 512 bits (AVX-512 F, DQ, BW, VL); simd/portable.h has the same functions in plain C++.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "simd/transpose.h"  // IWYU pragma: export

namespace ridgeline {
namespace {

constexpr int kLanes = 16;
typedef __m512i Vi;
typedef __m512 Vf;

inline Vf load_f(const float* p) { return _mm512_loadu_ps(p); }
inline void store_f(float* p, Vf v) { _mm512_storeu_ps(p, v); }
inline void stream_f(float* p, Vf v) { _mm512_stream_ps(p, v); }
inline Vf set_f(float x) { return _mm512_set1_ps(x); }
inline Vf add_f(Vf a, Vf b) { return _mm512_add_ps(a, b); }
inline Vf sub_f(Vf a, Vf b) { return _mm512_sub_ps(a, b); }
inline Vf mul_f(Vf a, Vf b) { return _mm512_mul_ps(a, b); }
inline Vf div_f(Vf a, Vf b) { return _mm512_div_ps(a, b); }
inline Vf max_f(Vf a, Vf b) { return _mm512_max_ps(a, b); }

// a * b + c, rounded once.
inline Vf fma_f(Vf a, Vf b, Vf c) { return _mm512_fmadd_ps(a, b, c); }
inline Vf mul_add_f(Vf a, Vf b, Vf c) { return fma_f(a, b, c); }

inline Vi load_i(const void* p) { return _mm512_loadu_si512(p); }
inline void store_i(void* p, Vi v) { _mm512_storeu_si512(p, v); }
inline Vi set_i(int32_t x) { return _mm512_set1_epi32(x); }
inline Vi add_i(Vi a, Vi b) { return _mm512_add_epi32(a, b); }
inline Vi mul_i(Vi a, Vi b) { return _mm512_mullo_epi32(a, b); }
inline Vi max_i(Vi a, Vi b) { return _mm512_max_epi32(a, b); }
inline Vi load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vi load_s8(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Vf as_f(Vi v) { return _mm512_castsi512_ps(v); }
inline Vi as_i(Vf v) { return _mm512_castps_si512(v); }
inline Vf abs_f(Vf a) { return as_f(_mm512_and_si512(as_i(a), set_i(0x7FFFFFFF))); }
inline Vf copy_sign_f(Vf a, Vf sign) {
  return as_f(_mm512_or_si512(as_i(a), _mm512_and_si512(as_i(sign), set_i(INT32_MIN))));
}

// To the nearest integer, ties to even.
inline Vi to_i(Vf v) { return _mm512_cvtps_epi32(v); }
inline Vf to_f(Vi v) { return _mm512_cvtepi32_ps(v); }
inline Vf round_f(Vf v) { return _mm512_roundscale_ps(v, 0); }

// p * 2^n for integers n >= -127; n = -127 gives 0.
inline Vf scale_by_power_of_two(Vf p, Vf n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set_f(-127.0f), _CMP_GT_OQ), p, n);
}

// Of pairs of 16-bit words, one pair per lane: the upper word in place, the lower one moved up.
// Pairs of bfloat16 become floats this way.
inline Vi upper_words(Vi v) {
  return _mm512_and_si512(v, set_i(static_cast<int32_t>(0xFFFF0000u)));
}
inline Vi lower_words(Vi v) { return _mm512_slli_epi32(v, 16); }

inline __m256 half_of(Vf v, int high) {
  const __m512d pairs = _mm512_castps_pd(v);
  return _mm256_castpd_ps(high ? _mm512_extractf64x4_pd(pairs, 1) : _mm512_castpd512_pd256(pairs));
}
inline Vf load_f16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void store_f16(void* p, Vf v) {
  for (int high = 0; high < 2; ++high)
    _mm_storeu_si128(static_cast<__m128i*>(p) + high, _mm256_cvtps_ph(half_of(v, high), 0));
}

inline float reduce_max(Vf v) {
  const __m256 h = _mm256_max_ps(half_of(v, 0), half_of(v, 1));
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
inline float reduce_add(Vf v) {
  const __m256 h = _mm256_add_ps(half_of(v, 0), half_of(v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline int32_t reduce_max(Vi v) { return _mm512_reduce_max_epi32(v); }
inline int32_t reduce_add(Vi v) {
  const __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// The lower 16 bits of each number of a, then of b.
inline void store_i16(void* to, Vi a, Vi b) {
  alignas(64) static constexpr int16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                    22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                    44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  store_i(to, _mm512_permutex2var_epi16(a, load_i(kEven), b));
}

// The upper 16 bits of each number of a, then of b: of floats, as bfloat16.
inline Vi upper_i16(Vi a, Vi b) {
  alignas(64) static constexpr int16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                   23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                   45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(a, load_i(kOdd), b);
}

// The same four bytes in every lane.
inline Vi broadcast_4(const uint8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return set_i(four);
}

inline Vi and_i(Vi a, Vi b) { return _mm512_and_si512(a, b); }
template <int kBits>
inline Vi shift_left(Vi v) {
  return _mm512_slli_epi32(v, kBits);
}
template <int kBits>
inline Vi shift_right_signed(Vi v) {
  return _mm512_srai_epi32(v, kBits);
}

// Of four unsigned bytes a b c d per lane: the words (a, c), and (b, d).
inline Vi even_bytes(Vi v) { return _mm512_and_si512(v, set_i(0x00FF00FF)); }
inline Vi odd_bytes(Vi v) { return _mm512_srli_epi16(v, 8); }

}  // namespace
}  // namespace ridgeline

#include "simd/avx512_instructions.h"  // IWYU pragma: export
