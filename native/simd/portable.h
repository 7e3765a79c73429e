// Vectors of four floats in plain C++ on GCC's vector extensions: any CPU, and the slow twin of
// simd/avx2.h and simd/avx512.h.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace ridgeline {
namespace {

constexpr int kLanes = 4;
typedef float Vf __attribute__((vector_size(16)));
typedef int32_t Vi __attribute__((vector_size(16)));

inline Vf load_f(const float* p) {
  Vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store_f(float* p, Vf v) { memcpy(p, &v, sizeof v); }
inline void stream_f(float* p, Vf v) { store_f(p, v); }
inline Vf set_f(float x) { return Vf{x, x, x, x}; }
inline Vf add_f(Vf a, Vf b) { return a + b; }
inline Vf sub_f(Vf a, Vf b) { return a - b; }
inline Vf mul_f(Vf a, Vf b) { return a * b; }
inline Vf div_f(Vf a, Vf b) { return a / b; }
inline Vf max_f(Vf a, Vf b) { return a > b ? a : b; }

// a * b + c, rounded once.
inline Vf fma_f(Vf a, Vf b, Vf c) {
  return Vf{fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]),
            fmaf(a[3], b[3], c[3])};
}
// a * b + c, rounded as is fastest: twice here, once where the CPU fuses.
inline Vf mul_add_f(Vf a, Vf b, Vf c) { return a * b + c; }

inline Vi load_i(const void* p) {
  Vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store_i(void* p, Vi v) { memcpy(p, &v, sizeof v); }
inline Vi set_i(int32_t x) { return Vi{x, x, x, x}; }
inline Vi add_i(Vi a, Vi b) { return a + b; }
inline Vi mul_i(Vi a, Vi b) { return a * b; }
inline Vi max_i(Vi a, Vi b) { return a > b ? a : b; }
inline Vi load_u8(const uint8_t* p) { return Vi{p[0], p[1], p[2], p[3]}; }
inline Vi load_s8(const int8_t* p) { return Vi{p[0], p[1], p[2], p[3]}; }

inline Vf as_f(Vi v) { return reinterpret_cast<Vf>(v); }
inline Vi as_i(Vf v) { return reinterpret_cast<Vi>(v); }
inline Vf abs_f(Vf a) { return as_f(as_i(a) & 0x7FFFFFFF); }
inline Vf copy_sign_f(Vf a, Vf sign) { return as_f(as_i(a) | (as_i(sign) & set_i(INT32_MIN))); }

// To the nearest integer, ties to even.
inline Vi to_i(Vf v) {
  return Vi{static_cast<int32_t>(lrintf(v[0])), static_cast<int32_t>(lrintf(v[1])),
            static_cast<int32_t>(lrintf(v[2])), static_cast<int32_t>(lrintf(v[3]))};
}
inline Vf to_f(Vi v) { return __builtin_convertvector(v, Vf); }
inline Vf round_f(Vf v) { return to_f(to_i(v)); }

// p * 2^n for integers n >= -127; n = -127 gives 0.
inline Vf scale_by_power_of_two(Vf p, Vf n) { return p * as_f((to_i(n) + 127) << 23); }

// Of pairs of 16-bit words, one pair per lane: the upper word in place, the lower one moved up.
// Pairs of bfloat16 become floats this way.
inline Vi upper_words(Vi v) { return v & static_cast<int32_t>(0xFFFF0000u); }
inline Vi lower_words(Vi v) { return v << 16; }

inline float f16_to_float(uint16_t h) {  // exact, subnormals included
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
inline Vf load_f16(const void* p) {
  uint16_t h[kLanes];
  memcpy(h, p, sizeof h);
  return Vf{f16_to_float(h[0]), f16_to_float(h[1]), f16_to_float(h[2]), f16_to_float(h[3])};
}

inline uint16_t float_to_f16(float x) {  // to the nearest, ties to even; beyond the range infinity
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = fabsf(x);
  if (!(size < 65520.0f))
    return static_cast<uint16_t>(sign | (size != size ? 0x7E00 | (bits >> 13 & 0x3FF) : 0x7C00));
  if (size == 0) return sign;
  int exponent;
  frexpf(size, &exponent);
  const int unit = exponent < -13 ? -24 : exponent - 11;  // exponent of the last of 11 bits
  const int mantissa = static_cast<int>(lrintf(ldexpf(size, -unit)));
  return static_cast<uint16_t>(sign + (unit + 24) * 1024 + mantissa);
}
inline void store_f16(void* p, Vf v) {
  uint16_t h[kLanes];
  for (int i = 0; i < kLanes; ++i) h[i] = float_to_f16(v[i]);
  memcpy(p, h, sizeof h);
}

inline float reduce_max(Vf v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
inline float reduce_add(Vf v) { return v[0] + v[1] + (v[2] + v[3]); }
inline int32_t reduce_max(Vi v) {
  const int32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
inline int32_t reduce_add(Vi v) { return v[0] + v[1] + v[2] + v[3]; }

// The lower 16 bits of each number of a, then of b.
inline void store_i16(void* to, Vi a, Vi b) {
  int16_t words[2 * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    words[i] = static_cast<int16_t>(a[i]);
    words[kLanes + i] = static_cast<int16_t>(b[i]);
  }
  memcpy(to, words, sizeof words);
}

// sum + the products of both pairs of signed 16-bit words in each lane.
template <bool kVnni>
inline Vi dot_i16(Vi sum, Vi a, Vi b) {
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

inline Vi and_i(Vi a, Vi b) { return a & b; }
template <int kBits>
inline Vi shift_left(Vi v) {
  return v << kBits;
}
template <int kBits>
inline Vi shift_right_signed(Vi v) {
  return v >> kBits;
}

// Of four unsigned bytes a b c d per lane: the words (a, c), and (b, d).
inline Vi even_bytes(Vi v) { return v & 0x00FF00FF; }
inline Vi odd_bytes(Vi v) { return v >> 8 & 0x00FF00FF; }

// Eight 32-bit words, for simd/transpose.h.
typedef int32_t Words8 __attribute__((vector_size(32)));

inline Words8 load_two_rows(const char* low, const char* high) {
  Words8 v;
  memcpy(&v, low, 16);
  memcpy(reinterpret_cast<char*>(&v) + 16, high, 16);
  return v;
}
inline Words8 load_two_rows_f16(const char* low, const char* high) {
  const Vf a = load_f16(low), b = load_f16(high);
  return load_two_rows(reinterpret_cast<const char*>(&a), reinterpret_cast<const char*>(&b));
}
inline void transpose(Words8 (&w)[4]) {
  Words8 to[4];
  for (int word = 0; word < 4; ++word)
    for (int row = 0; row < 8; ++row) to[word][row] = w[row % 4][row / 4 * 4 + word];
  for (int word = 0; word < 4; ++word) w[word] = to[word];
}
inline void store_words(int32_t* to, Words8 v) { memcpy(to, &v, sizeof v); }
inline void store_scaled(float* to, Words8 v, float by) {
  float x[8];
  memcpy(x, &v, sizeof x);
  for (int i = 0; i < 8; ++i) to[i] = x[i] * by;
}
inline Words8 upper_words(Words8 v) { return v & static_cast<int32_t>(0xFFFF0000u); }
inline Words8 lower_words(Words8 v) { return v << 16; }

}  // namespace
}  // namespace ridgeline
