// The linear kernels in plain C++: the slow twin of every other variant, and what any other CPU runs.
#include <math.h>
#include <string.h>

#include "linear.h"

#define LANES 16
namespace ridgeline {
namespace {

struct Vi {
  int32_t v[LANES];
};
struct Vf {
  float v[LANES];
};

#define EACH(expression)                             \
  for (int i = 0; i < LANES; ++i) out.v[i] = (expression); \
  return out

inline Vi load_i(const int32_t* p) { Vi out; memcpy(&out, p, sizeof out); return out; }
inline void store_i(int32_t* p, Vi v) { memcpy(p, &v, sizeof v); }
inline Vi set_i(int32_t x) { Vi out; EACH(x); }
inline Vi mul_i(Vi a, Vi b) { Vi out; EACH(a.v[i] * b.v[i]); }
inline Vi load_u8(const uint8_t* p) { Vi out; EACH(p[i]); }
inline Vi load_s8(const int8_t* p) { Vi out; EACH(p[i]); }
inline Vf load_f(const float* p) { Vf out; memcpy(&out, p, sizeof out); return out; }
inline void store_f(float* p, Vf v) { memcpy(p, &v, sizeof v); }
inline Vf set_f(float x) { Vf out; EACH(x); }
inline Vf mul_f(Vf a, Vf b) { Vf out; EACH(a.v[i] * b.v[i]); }
inline Vf fma_f(Vf a, Vf b, Vf c) { Vf out; EACH(fmaf(a.v[i], b.v[i], c.v[i])); }
inline Vf max_f(Vf a, Vf b) { Vf out; EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Vf abs_f(Vf a) { Vf out; EACH(fabsf(a.v[i])); }
inline Vf to_f(Vi a) { Vf out; EACH(static_cast<float>(a.v[i])); }

// fp16 to float: exact, subnormals included.
inline float half(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
inline Vf load_half(const uint16_t* p) { Vf out; EACH(half(p[i])); }

inline float max_of(Vf a) {
  for (int i = 1; i < LANES; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}

inline void round_block(const float* x, Vf inverse, int8_t* to, Vi& sum) {
  const float magic = 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer, ties to even
  for (int i = 0; i < kBlock; ++i) {
    to[i] = static_cast<int8_t>(static_cast<int32_t>(x[i] * inverse.v[0] + magic - magic));
    sum.v[i % LANES] += to[i];
  }
}
inline int32_t total_of(Vi sum) {
  for (int i = 1; i < LANES; ++i) sum.v[0] += sum.v[i];
  return sum.v[0];
}

constexpr int kTilePanels = 1;

}  // namespace
}  // namespace ridgeline
#include "linear_engines.inc"
namespace ridgeline {
namespace {

struct Bytes : Walks {
  struct Vec {
    uint8_t v[kLineBytes];
  };
  using Part = Vi;
  static constexpr bool kWidens = false;
  static constexpr int kRows = 4;
  static Vec load(const void* p) { Vec out; memcpy(&out, p, sizeof out); return out; }
  static void store(void* p, const Vec& v) { memcpy(p, &v, sizeof v); }
  static Vec spread(const uint8_t* p) { Vec out; memcpy(out.v, p, 4); return out; }
  static Vi begin(const int32_t* acc) { return load_i(acc); }
  static void end(int32_t* acc, const Vi& part) { store_i(acc, part); }
  static Vi dot(const Vi& part, const Vec& w, const Vec& x) {
    int8_t row[4];
    memcpy(row, x.v, 4);
    Vi out;
    EACH(part.v[i] + w.v[4 * i] * row[0] + w.v[4 * i + 1] * row[1] + w.v[4 * i + 2] * row[2] +
         w.v[4 * i + 3] * row[3]);
  }
};

struct Int4 : Bytes, Int4Common {
  static void decode(const uint8_t* line, Vec (&w)[2][1]) {
    for (int i = 0; i < kLineBytes; ++i) {
      w[0][0].v[i] = line[i] & 15;
      w[1][0].v[i] = line[i] >> 4;
    }
  }
};

struct Int8 : Bytes, Int8Common<128> {
  static constexpr int kPerLine = 1;
  static void decode(const uint8_t* line, Vec (&w)[1][1]) { memcpy(w[0][0].v, line, kLineBytes); }
};

template <int B>
using Int8Groups = GroupsOf<Int8, B>;

struct Floats : Walks {  // weights and rows as they are in a Vf
  using Vec = Vf;
  using Part = Vf;
  static constexpr bool kWidens = false;
  static constexpr int kRows = 4;
  static Vf load(const void* p) { return load_f(static_cast<const float*>(p)); }
  static void store(void* p, Vf v) { store_f(static_cast<float*>(p), v); }
  static Vf spread(const uint8_t* p) { float x; memcpy(&x, p, 4); return set_f(x); }
  static Vf begin(const float* acc) { return load_f(acc); }
  static void end(float* acc, Vf part) { store_f(acc, part); }
  static Vf dot(Vf part, Vf w, Vf x) { return fma_f(w, x, part); }
};

struct Bf16 : Floats, Bf16Common {
  static void decode(const uint8_t* line, Vf (&w)[2][1]) {
    for (int i = 0; i < LANES; ++i) {
      uint32_t both;
      memcpy(&both, line + 4 * i, 4);
      const uint32_t low = both << 16, high = both & 0xFFFF0000u;
      memcpy(&w[0][0].v[i], &low, 4);
      memcpy(&w[1][0].v[i], &high, 4);
    }
  }
};

struct Fp32 : Floats, Fp32Common {
  static void decode(const uint8_t* line, Vec (&w)[1][1]) {
    w[0][0] = load_f(reinterpret_cast<const float*>(line) + 0 * LANES);
  }
};

constexpr int kDirectRows = 1, kDirectMost = 1, kStoredRows = 1, kStoredMost = 1;

}  // namespace
}  // namespace ridgeline
#define LINEAR_OPS linear_ops_portable
#define ISA_NAME "portable"
#include "linear_kernel.inc"
