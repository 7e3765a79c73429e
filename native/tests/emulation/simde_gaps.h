// AVX-512 instructions that SIMDe 0.7.4 does not emulate, or rounds twice (fmadd), lane by lane.
#pragma once
#include <math.h>
#include <string.h>

#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

inline __m512 gap_cvtepi32_ps(__m512i a) {
  int32_t x[16];
  float y[16];
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; ++i) y[i] = static_cast<float>(x[i]);
  __m512 out;
  memcpy(&out, y, 64);
  return out;
}

inline __m512i gap_cvtps_epi32(__m512 a) {
  float x[16];
  int32_t y[16];
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; ++i) y[i] = static_cast<int32_t>(nearbyintf(x[i]));
  __m512i out;
  memcpy(&out, y, 64);
  return out;
}

inline __m128i gap_cvtepi32_epi8(__m512i a) {
  int32_t x[16];
  int8_t y[16];
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; ++i) y[i] = static_cast<int8_t>(x[i]);
  __m128i out;
  memcpy(&out, y, 16);
  return out;
}

inline __m512i gap_madd_epi16(__m512i a, __m512i b) {
  int16_t x[32], y[32];
  int32_t z[16];
  memcpy(x, &a, 64);
  memcpy(y, &b, 64);
  for (int i = 0; i < 16; ++i) z[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  __m512i out;
  memcpy(&out, z, 64);
  return out;
}

inline __m512i gap_shuffle_epi32(__m512i a, int order) {
  int32_t x[16], y[16];
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; ++i) y[i] = x[i / 4 * 4 + (order >> 2 * (i % 4) & 3)];
  __m512i out;
  memcpy(&out, y, 64);
  return out;
}

inline __m512 gap_cvtph_ps(__m256i a) {
  uint16_t x[16];
  float y[16];
  memcpy(x, &a, 32);
  for (int i = 0; i < 16; ++i) y[i] = simde_float16_to_float32(simde_uint16_as_float16(x[i]));
  __m512 out;
  memcpy(&out, y, 64);
  return out;
}

inline __m512i gap_cvtepu8_epi32(__m128i a) {
  uint8_t x[16];
  int32_t y[16];
  memcpy(x, &a, 16);
  for (int i = 0; i < 16; ++i) y[i] = x[i];
  __m512i out;
  memcpy(&out, y, 64);
  return out;
}

inline __m512i gap_cvtepi8_epi32(__m128i a) {
  int8_t x[16];
  int32_t y[16];
  memcpy(x, &a, 16);
  for (int i = 0; i < 16; ++i) y[i] = x[i];
  __m512i out;
  memcpy(&out, y, 64);
  return out;
}

inline __m512 gap_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  float x[16], y[16], z[16];
  memcpy(x, &a, 64);
  memcpy(y, &b, 64);
  memcpy(z, &c, 64);
  for (int i = 0; i < 16; ++i) z[i] = fmaf(x[i], y[i], z[i]);
  __m512 out;
  memcpy(&out, z, 64);
  return out;
}

inline __m256i gap_cvtepi32_epi16(__m512i a) {
  int32_t x[16];
  int16_t y[16];
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; ++i) y[i] = static_cast<int16_t>(x[i]);
  __m256i out;
  memcpy(&out, y, 32);
  return out;
}

#undef _mm512_fmadd_ps
#define _mm512_cvtepi32_epi16 gap_cvtepi32_epi16
#define _mm512_fmadd_ps gap_fmadd_ps
#define _mm512_cvtepu8_epi32 gap_cvtepu8_epi32
#define _mm512_cvtepi8_epi32 gap_cvtepi8_epi32
#define _MM_PERM_ENUM int
#define _mm512_shuffle_epi32 gap_shuffle_epi32
#define _mm512_cvtepi32_ps gap_cvtepi32_ps
#define _mm512_cvtps_epi32 gap_cvtps_epi32
#define _mm512_cvtepi32_epi8 gap_cvtepi32_epi8
#define _mm512_madd_epi16 gap_madd_epi16
#define _mm512_cvtph_ps gap_cvtph_ps
#define _mm512_stream_ps _mm512_store_ps
