// Vectors of four floats in plain C++ on GCC vector extensions: any CPU.
#include <math.h>
#include <string.h>

#include "attention.h"

#define LANES 4
#define ATTENTION_OPS attention_ops_portable
#define ISA_NAME "portable"
namespace ridgeline {
namespace {

typedef float Vf __attribute__((vector_size(16)));
typedef int32_t Vi __attribute__((vector_size(16)));
constexpr int kRows = 4;
constexpr int kWholeRows = 4;

inline Vf load_f(const float* p) {
  Vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store_f(float* p, Vf v) { memcpy(p, &v, sizeof v); }
inline Vf set_f(float x) { return Vf{x, x, x, x}; }
inline Vf add_f(Vf a, Vf b) { return a + b; }
inline Vf sub_f(Vf a, Vf b) { return a - b; }
inline Vf mul_f(Vf a, Vf b) { return a * b; }
inline Vf div_f(Vf a, Vf b) { return a / b; }
inline Vf fma_f(Vf a, Vf b, Vf c) { return a * b + c; }
inline Vf max_f(Vf a, Vf b) { return a > b ? a : b; }
inline Vi set_i(int32_t x) { return Vi{x, x, x, x}; }
inline Vf abs_f(Vf a) { return reinterpret_cast<Vf>(reinterpret_cast<Vi>(a) & 0x7FFFFFFF); }
inline Vf with_sign_of(Vf a, Vf b) {
  const Vi sign = reinterpret_cast<Vi>(b) & set_i(INT32_MIN);
  return reinterpret_cast<Vf>(reinterpret_cast<Vi>(a) | sign);
}
inline Vi load_i(const void* p) {
  Vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store_i(void* p, Vi v) { memcpy(p, &v, sizeof v); }
inline Vi add_i(Vi a, Vi b) { return a + b; }
inline Vi to_i(Vf v) {
  Vi n;
  for (int i = 0; i < LANES; ++i) n[i] = static_cast<int32_t>(lrintf(v[i]));
  return n;
}
inline Vf to_f(Vi v) { return __builtin_convertvector(v, Vf); }
inline Vf round_f(Vf v) { return to_f(to_i(v)); }
// p * 2^n for whole n >= -127, of which the last gives 0.
inline Vf by_power_of_two(Vf p, Vf n) { return p * reinterpret_cast<Vf>((to_i(n) + 127) << 23); }
inline Vf bits_f(Vi v) { return reinterpret_cast<Vf>(v); }
inline Vi high_half(Vi v) { return v & static_cast<int32_t>(0xFFFF0000u); }
inline Vi low_half_up(Vi v) { return v << 16; }

inline float half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  if (exponent == 31) size = mantissa ? NAN : INFINITY;
  return h & 0x8000 ? -size : size;
}

inline Vf load_halves(const void* p) {
  uint16_t h[LANES];
  memcpy(h, p, sizeof h);
  return Vf{half_value(h[0]), half_value(h[1]), half_value(h[2]), half_value(h[3])};
}

inline uint16_t half_of(float x) {  // to the nearest, ties to even; beyond its range infinity
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const float size = fabsf(x);
  if (!(size < 65520.0f)) return static_cast<uint16_t>(sign | (size != size ? 0x7E00 | (bits >> 13 & 0x3FF) : 0x7C00));
  if (size == 0) return sign;
  int exponent;
  frexpf(size, &exponent);
  const int unit = exponent < -13 ? -24 : exponent - 11;  // what the last of 11 bits is worth
  const int whole = static_cast<int>(lrintf(ldexpf(size, -unit)));
  return static_cast<uint16_t>(sign + (unit + 24) * 1024 + whole);
}
inline void store_halves(void* p, Vf v) {
  uint16_t h[LANES];
  for (int i = 0; i < LANES; ++i) h[i] = half_of(v[i]);
  memcpy(p, h, sizeof h);
}

inline float max_of(Vf v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
inline float sum_of(Vf v) { return v[0] + v[1] + (v[2] + v[3]); }
inline int32_t sum_of(Vi v) { return v[0] + v[1] + v[2] + v[3]; }

inline void store_words(int32_t* to, Vi a, Vi b) {
  int16_t words[2 * LANES];
  for (int i = 0; i < LANES; ++i) {
    words[i] = static_cast<int16_t>(a[i]);
    words[LANES + i] = static_cast<int16_t>(b[i]);
  }
  memcpy(to, words, sizeof words);
}

inline Vi madd(Vi sum, Vi a, Vi b) { return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16); }

inline Vi even_bytes(Vi v) { return v & 0x00FF00FF; }
inline Vi odd_bytes(Vi v) { return v >> 8 & 0x00FF00FF; }

}  // namespace
}  // namespace ridgeline
#include "attention_kernel.inc"
#include "attention_driver.inc"
