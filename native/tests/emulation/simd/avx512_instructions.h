// Twin of native/simd/avx512_instructions.h.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace ridgeline {
namespace {

inline __m512i dot_u8s8(__m512i sum, __m512i a, __m512i b) {
  return _mm512_dpbusd_epi32(sum, a, b);
}
inline __m512i dot_u8s8_memory(__m512i sum, __m512i a, const uint8_t* four) {
  int32_t x;
  memcpy(&x, four, sizeof x);
  return _mm512_dpbusd_epi32(sum, a, _mm512_set1_epi32(x));
}
inline __m512i madd_u8s8_i16(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
}
template <bool kVnni>
inline __m512i dot_i16(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
inline bool has_byte_expand() { return true; }
inline __m512i expand_bytes(__m512i background, uint64_t mask, __m256i kept) {
  uint8_t out[64], from[32];
  _mm512_storeu_si512(out, background);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(from), kept);
  const uint8_t* next = from;
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) out[i] = *next++;
  return _mm512_loadu_si512(out);
}

inline __m512 load_first(const float* from, int count) {
  float all[16] = {};
  memcpy(all, from, sizeof(float) * count);
  return _mm512_loadu_ps(all);
}
inline __m512i load_first(const int32_t* from, int count) {
  int32_t all[16] = {};
  memcpy(all, from, sizeof(int32_t) * count);
  return _mm512_loadu_si512(all);
}

}  // namespace
}  // namespace ridgeline
