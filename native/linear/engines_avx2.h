// Engines of 256 bits. With AVX-VNNI, bytes are multiplied by vpdpbusd. Without it, 4-bit weights
// are multiplied by vpmaddubsw (eight steps of 2 * 15 * 127 fit 16 bits) and 8-bit weights,
// widened, by vpmaddwd: always exact.
#pragma once
#include "linear/engine.h"
#include "simd/avx2.h"

namespace ridgeline {
namespace {

// 32 floats times `inverse`, rounded to the nearest (ties to even), to bytes. They are added to
// `sum`, whose lanes add up to their sum.
inline void quantise_block(const float* x, Vf inverse, int8_t* to, Vi& sum) {
  Vi v[4];
  for (int i = 0; i < 4; ++i) v[i] = to_i(mul_f(load_f(x + 8 * i), inverse));
  sum = add_i(sum, add_i(add_i(v[0], v[1]), add_i(v[2], v[3])));
  const Vi bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  store_i(to, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

template <class V>
struct Bytes : EngineDefaults<V> {
  using Vec = Vi;
  using Part = Vi;
  static Vi load(const void* p) { return load_i(p); }
  static void store(void* p, Vi v) { store_i(p, v); }
  static Vi broadcast(const uint8_t* p) { return broadcast_4(p); }
};

template <class V>
struct Sums32 : Bytes<V> {  // products are added in 32 bits: sums stay in registers
  static constexpr int kRows = 6;
  static Vi begin(const int32_t* acc) { return load_i(acc); }
  static void end(int32_t* acc, Vi part) { store_i(acc, part); }
};

struct Nibbles {
  static void decode(const uint8_t* line, Vi (&w)[2][2]) {
    const Vi low = _mm256_set1_epi8(15), a = load_i(line), b = load_i(line + 32);
    w[0][0] = _mm256_and_si256(a, low);
    w[0][1] = _mm256_and_si256(b, low);
    w[1][0] = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
    w[1][1] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
  }
};

template <class V>
struct VnniSums : Sums32<V> {
  static Vi dot(Vi part, Vi w, Vi x) { return dot_u8s8(part, w, x); }
};

template <class V>
struct Int4Vnni : VnniSums<V>, Nibbles, Int4Layout {};

template <class V>
struct Int8Vnni : VnniSums<V>, Int8Layout<128> {
  static constexpr int kStepsPerLine = 1;
  static void decode(const uint8_t* line, Vi (&w)[1][2]) {
    w[0][0] = load_i(line);
    w[0][1] = load_i(line + 32);
  }
};

template <class V>
struct Int4Maddubs : Bytes<V>, Nibbles, Int4Layout {  // added in 16 bits, widened once per block
  static constexpr bool kWidensPerBlock = true;
  static constexpr int kRows = 4;
  static Vi product(Vi w, Vi x) { return _mm256_maddubs_epi16(w, x); }
  static Vi dot(Vi part, Vi w, Vi x) { return madd_u8s8_i16(part, w, x); }
  static Vi widen(Vi sum, Vi part) {
    return add_i(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
};

template <class V>
struct Int8Words : Sums32<V>, Int8Layout<0> {  // of bytes a b c d: words (a, c), then (b, d)
  static constexpr int kStepsPerLine = 2;
  static void decode(const uint8_t* line, Vi (&w)[2][2]) {
    for (int i = 0; i < 2; ++i) {
      const Vi v = _mm256_xor_si256(load_i(line + 32 * i), _mm256_set1_epi8(-128));
      w[0][i] = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
      w[1][i] = _mm256_srai_epi16(v, 8);
    }
  }
  static Vi dot(Vi part, Vi w, Vi x) { return dot_i16<false>(part, w, x); }
};

template <class V>
struct Floats : EngineDefaults<V> {
  using Vec = Vf;
  using Part = Vf;
  static constexpr int kRows = 6;
  static Vf load(const void* p) { return load_f(static_cast<const float*>(p)); }
  static void store(void* p, Vf v) { store_f(static_cast<float*>(p), v); }
  static Vf broadcast(const uint8_t* p) { return as_f(broadcast_4(p)); }
  static Vf begin(const float* acc) { return load_f(acc); }
  static void end(float* acc, Vf part) { store_f(acc, part); }
  static Vf dot(Vf part, Vf w, Vf x) { return fma_f(w, x, part); }
};

template <class V>
struct Bf16Floats : Floats<V>, Bf16Layout {
  static void decode(const uint8_t* line, Vf (&w)[2][2]) {
    for (int i = 0; i < 2; ++i) {
      const Vi v = load_i(line + 32 * i);
      w[0][i] = as_f(lower_words(v));
      w[1][i] = as_f(upper_words(v));
    }
  }
};

template <class V>
struct Fp32Floats : Floats<V>, Fp32Layout {
  static void decode(const uint8_t* line, Vf (&w)[1][2]) {
    w[0][0] = load_f(reinterpret_cast<const float*>(line));
    w[0][1] = load_f(reinterpret_cast<const float*>(line) + kLanes);
  }
};

struct Avx2 : VariantDefaults {
  // Decoding a line again for each tile costs less than a round trip through L1.
  static constexpr int kDirectRows = 4, kDirectMaxRows = 16, kStoredRows = 6, kStoredMaxRows = 48;
  using Int4 = Int4Maddubs<Avx2>;
  using Int8 = Int8Words<Avx2>;
  using Bf16 = Bf16Floats<Avx2>;
  using Fp32 = Fp32Floats<Avx2>;
};

struct AvxVnni : VariantDefaults {
  static constexpr int kDirectRows = 4, kDirectMaxRows = 4, kStoredRows = 6, kStoredMaxRows = 48;
  using Int4 = Int4Vnni<AvxVnni>;
  using Int8 = Int8Vnni<AvxVnni>;
  using Bf16 = Bf16Floats<AvxVnni>;
  using Fp32 = Fp32Floats<AvxVnni>;
};

}  // namespace
}  // namespace ridgeline
