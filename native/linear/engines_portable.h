// Engines in plain C++: the slow twins of all others, and what other CPUs run.
#pragma once
#include <string.h>

#include "linear/engine.h"
#include "simd/portable.h"

namespace ridgeline {
namespace {

// 32 floats times `inverse`, rounded to the nearest (ties to even), to bytes. They are added to
// `sum`, whose lanes add up to their sum.
inline void quantise_block(const float* x, Vf inverse, int8_t* to, Vi& sum) {
  for (int i = 0; i < kBlock; ++i) {
    to[i] = static_cast<int8_t>(
        static_cast<int32_t>(x[i] * inverse[0] + kIntegerOffset - kIntegerOffset));
    sum[i % kLanes] += to[i];
  }
}

template <class V>
struct Bytes : EngineDefaults<V> {
  struct Vec {  // four bytes for each of four outputs
    uint8_t v[4 * kLanes];
  };
  using Part = Vi;
  static constexpr int kRows = 4;
  static Vec load(const void* p) {
    Vec out;
    memcpy(&out, p, sizeof out);
    return out;
  }
  static void store(void* p, const Vec& v) { memcpy(p, &v, sizeof v); }
  static Vec broadcast(const uint8_t* p) {
    Vec out;
    memcpy(out.v, p, 4);
    return out;
  }
  static Vi begin(const int32_t* acc) { return load_i(acc); }
  static void end(int32_t* acc, Vi part) { store_i(acc, part); }
  static Vi dot(Vi part, const Vec& w, const Vec& x) {
    int8_t row[4];
    memcpy(row, x.v, 4);
    for (int i = 0; i < kLanes; ++i)
      part[i] += w.v[4 * i] * row[0] + w.v[4 * i + 1] * row[1] + w.v[4 * i + 2] * row[2] +
                 w.v[4 * i + 3] * row[3];
    return part;
  }
};

template <class V>
struct Int4Bytes : Bytes<V>, Int4Layout {
  using Vec = typename Bytes<V>::Vec;
  static void decode(const uint8_t* line, Vec (&w)[2][kVecs]) {
    for (int i = 0; i < kLineBytes; ++i) {
      w[0][i / sizeof(Vec)].v[i % sizeof(Vec)] = line[i] & 15;
      w[1][i / sizeof(Vec)].v[i % sizeof(Vec)] = line[i] >> 4;
    }
  }
};

template <class V>
struct Int8Bytes : Bytes<V>, Int8Layout<128> {
  using Vec = typename Bytes<V>::Vec;
  static constexpr int kStepsPerLine = 1;
  static void decode(const uint8_t* line, Vec (&w)[1][kVecs]) { memcpy(w, line, kLineBytes); }
};

template <class V>
struct Floats : EngineDefaults<V> {
  using Vec = Vf;
  using Part = Vf;
  static constexpr int kRows = 4;
  static Vf load(const void* p) { return load_f(static_cast<const float*>(p)); }
  static void store(void* p, Vf v) { store_f(static_cast<float*>(p), v); }
  static Vf broadcast(const uint8_t* p) {
    float x;
    memcpy(&x, p, 4);
    return set_f(x);
  }
  static Vf begin(const float* acc) { return load_f(acc); }
  static void end(float* acc, Vf part) { store_f(acc, part); }
  static Vf dot(Vf part, Vf w, Vf x) { return fma_f(w, x, part); }
};

template <class V>
struct Bf16Floats : Floats<V>, Bf16Layout {
  static void decode(const uint8_t* line, Vf (&w)[2][kVecs]) {
    for (int i = 0; i < kVecs; ++i) {
      const Vi v = load_i(line + 4 * kLanes * i);
      w[0][i] = as_f(lower_words(v));
      w[1][i] = as_f(upper_words(v));
    }
  }
};

template <class V>
struct Fp32Floats : Floats<V>, Fp32Layout {
  static void decode(const uint8_t* line, Vf (&w)[1][kVecs]) {
    for (int i = 0; i < kVecs; ++i)
      w[0][i] = load_f(reinterpret_cast<const float*>(line) + i * kLanes);
  }
};

struct Portable : VariantDefaults {
  static constexpr int kDirectRows = 1, kDirectMaxRows = 1, kStoredRows = 1, kStoredMaxRows = 1;
  using Int4 = Int4Bytes<Portable>;
  using Int8 = Int8Bytes<Portable>;
  using Bf16 = Bf16Floats<Portable>;
  using Fp32 = Fp32Floats<Portable>;
};

}  // namespace
}  // namespace ridgeline
