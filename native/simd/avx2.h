// Vectors of 256 bits (AVX2, FMA, F16C); simd/portable.h has the same functions in plain C++.
//
// Multiply-adds of integers are assembly: GCC 12 gathers the products of a whole tile first and
// then spills them. Those that need AVX-VNNI are encoded as VEX and need no compiler flag; call
// them only where the CPU has it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "simd/transpose.h"  // IWYU pragma: export

namespace ridgeline {
namespace {

constexpr int kLanes = 8;
typedef __m256i Vi;
typedef __m256 Vf;

inline Vf load_f(const float* p) { return _mm256_loadu_ps(p); }
inline void store_f(float* p, Vf v) { _mm256_storeu_ps(p, v); }
inline void stream_f(float* p, Vf v) { _mm256_stream_ps(p, v); }
inline Vf set_f(float x) { return _mm256_set1_ps(x); }
inline Vf add_f(Vf a, Vf b) { return _mm256_add_ps(a, b); }
inline Vf sub_f(Vf a, Vf b) { return _mm256_sub_ps(a, b); }
inline Vf mul_f(Vf a, Vf b) { return _mm256_mul_ps(a, b); }
inline Vf div_f(Vf a, Vf b) { return _mm256_div_ps(a, b); }
inline Vf max_f(Vf a, Vf b) { return _mm256_max_ps(a, b); }

// a * b + c, rounded once.
inline Vf fma_f(Vf a, Vf b, Vf c) { return _mm256_fmadd_ps(a, b, c); }
inline Vf mul_add_f(Vf a, Vf b, Vf c) { return fma_f(a, b, c); }

inline Vi load_i(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_i(void* p, Vi v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline Vi set_i(int32_t x) { return _mm256_set1_epi32(x); }
inline Vi add_i(Vi a, Vi b) { return _mm256_add_epi32(a, b); }
inline Vi mul_i(Vi a, Vi b) { return _mm256_mullo_epi32(a, b); }
inline Vi max_i(Vi a, Vi b) { return _mm256_max_epi32(a, b); }
inline Vi load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vi load_s8(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

inline Vf as_f(Vi v) { return _mm256_castsi256_ps(v); }
inline Vi as_i(Vf v) { return _mm256_castps_si256(v); }
inline Vf abs_f(Vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Vf copy_sign_f(Vf a, Vf sign) {
  return _mm256_or_ps(a, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}

// To the nearest integer, ties to even.
inline Vi to_i(Vf v) { return _mm256_cvtps_epi32(v); }
inline Vf to_f(Vi v) { return _mm256_cvtepi32_ps(v); }
inline Vf round_f(Vf v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// p * 2^n for integers n >= -127; n = -127 gives 0.
inline Vf scale_by_power_of_two(Vf p, Vf n) {
  return mul_f(p, as_f(_mm256_slli_epi32(_mm256_add_epi32(to_i(n), set_i(127)), 23)));
}

inline Vf load_f16(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline void store_f16(void* p, Vf v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
}

inline float reduce_max(Vf v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
inline float reduce_add(Vf v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline int32_t reduce_max(Vi v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}
inline int32_t reduce_add(Vi v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// The lower 16 bits of each number of a, then of b; numbers beyond 16 bits saturate.
inline void store_i16(void* to, Vi a, Vi b) {
  store_i(to, _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8));
}

// The same four bytes in every lane.
inline Vi broadcast_4(const uint8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return set_i(four);
}

// sum + the four products of unsigned by signed bytes in each lane (AVX-VNNI).
inline Vi dot_u8s8(Vi sum, Vi a, Vi b) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}

// 16-bit sums + products of pairs of unsigned by signed bytes.
inline Vi madd_u8s8_i16(Vi sum, Vi a, Vi b) {
  Vi product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
  return sum;
}

// sum + the products of both pairs of signed 16-bit words in each lane; kVnni: in one instruction.
template <bool kVnni>
inline Vi dot_i16(Vi sum, Vi a, Vi b) {
  if constexpr (kVnni) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  } else {
    Vi product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
  }
  return sum;
}

inline Vi and_i(Vi a, Vi b) { return _mm256_and_si256(a, b); }
template <int kBits>
inline Vi shift_left(Vi v) {
  return _mm256_slli_epi32(v, kBits);
}
template <int kBits>
inline Vi shift_right_signed(Vi v) {
  return _mm256_srai_epi32(v, kBits);
}

// Of four unsigned bytes a b c d per lane: the words (a, c), and (b, d).
inline Vi even_bytes(Vi v) { return _mm256_and_si256(v, set_i(0x00FF00FF)); }
inline Vi odd_bytes(Vi v) { return _mm256_srli_epi16(v, 8); }

}  // namespace
}  // namespace ridgeline
