// Engines of 512 bits; engines_avx2.h says which instructions multiply what.
#pragma once
#include "linear/engine.h"
#include "simd/avx512.h"

namespace ridgeline {
namespace {

// 32 floats times `inverse`, rounded to the nearest (ties to even), to bytes. They are added to
// `sum`, whose lanes add up to their sum.
inline void quantise_block(const float* x, Vf inverse, int8_t* to, Vi& sum) {
  const Vi a = to_i(mul_f(load_f(x), inverse)), b = to_i(mul_f(load_f(x + 16), inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8(b));
  sum = add_i(sum, add_i(a, b));
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
  static constexpr int kRows = 12;
  static Vi begin(const int32_t* acc) { return load_i(acc); }
  static void end(int32_t* acc, Vi part) { store_i(acc, part); }
};

struct Nibbles {
  static void decode(const uint8_t* line, Vi (&w)[2][1]) {
    const Vi low = _mm512_set1_epi8(15), v = load_i(line);
    w[0][0] = _mm512_and_si512(v, low);
    w[1][0] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
  }
};

// One panel at a time, so that a tile of many rows has room for its sums: an instruction that reads
// its row from memory needs no other panel to share the load with.
template <class V>
struct VnniSums : Sums32<V> {
  static constexpr int kPanels = 1, kPrefetchLines = 96, kPrefetchLevel = 2;
  static constexpr int kPrefetchLinesManyRows = V::kPrefetchLinesManyRows;
  static constexpr int kNearPrefetchLines = V::kNearPrefetchLines;
  static constexpr int kNearPrefetchMinRows = V::kNearPrefetchMinRows;
  static constexpr bool kRowsFromMemory = true;
  static Vi dot(Vi part, Vi w, Vi x) { return dot_u8s8(part, w, x); }
  static Vi dot_memory(Vi part, Vi w, const uint8_t* x) { return dot_u8s8_memory(part, w, x); }
  static Vi zero() { return set_i(0); }
  static Vi add(Vi a, Vi b) { return add_i(a, b); }
};

template <class V>
struct Int4Vnni : VnniSums<V>, Nibbles, Int4Layout {
  static constexpr int kNearPrefetchLines = 24;
  static constexpr int kNearPrefetchMinRows = V::kInt4NearPrefetchMinRows;
};

template <class V>
struct Int8Vnni : VnniSums<V>, Int8Layout<128> {
  static constexpr int kStepsPerLine = 1;
  static void decode(const uint8_t* line, Vi (&w)[1][1]) { w[0][0] = load_i(line); }
};

template <class V>
struct Int4Maddubs : Bytes<V>, Nibbles, Int4Layout {  // added in 16 bits, widened once per block
  static constexpr bool kWidensPerBlock = true;
  static constexpr int kRows = 6;  // of two panels, with their sums of 16 and of 32 bits
  static Vi product(Vi w, Vi x) { return _mm512_maddubs_epi16(w, x); }
  static Vi dot(Vi part, Vi w, Vi x) { return madd_u8s8_i16(part, w, x); }
  static Vi widen(Vi sum, Vi part) {
    return add_i(sum, _mm512_madd_epi16(part, _mm512_set1_epi16(1)));
  }
};

template <class V>
struct Int8Words : Sums32<V>, Int8Layout<0> {  // of bytes a b c d: words (a, c), then (b, d)
  static constexpr int kStepsPerLine = 2;
  static void decode(const uint8_t* line, Vi (&w)[2][1]) {
    const Vi v = _mm512_xor_si512(load_i(line), _mm512_set1_epi8(-128));
    w[0][0] = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8);
    w[1][0] = _mm512_srai_epi16(v, 8);
  }
  static Vi dot(Vi part, Vi w, Vi x) { return dot_i16<false>(part, w, x); }
};

template <class V>
struct Floats : EngineDefaults<V> {
  using Vec = Vf;
  using Part = Vf;
  static constexpr int kRows = 12;
  static Vf load(const void* p) { return load_f(static_cast<const float*>(p)); }
  static void store(void* p, Vf v) { store_f(static_cast<float*>(p), v); }
  static Vf broadcast(const uint8_t* p) { return as_f(broadcast_4(p)); }
  static Vf begin(const float* acc) { return load_f(acc); }
  static void end(float* acc, Vf part) { store_f(acc, part); }
  static Vf dot(Vf part, Vf w, Vf x) { return fma_f(w, x, part); }
};

template <class V>
struct Bf16Floats : Floats<V>, Bf16Layout {
  static void decode(const uint8_t* line, Vf (&w)[2][1]) {
    const Vi v = load_i(line);
    w[0][0] = as_f(lower_words(v));
    w[1][0] = as_f(upper_words(v));
  }
};

template <class V>
struct Fp32Floats : Floats<V>, Fp32Layout {
  static void decode(const uint8_t* line, Vf (&w)[1][1]) {
    w[0][0] = load_f(reinterpret_cast<const float*>(line));
  }
};

struct Avx512 : VariantDefaults {
  static constexpr int kDirectRows = 4, kDirectMaxRows = 4, kStoredRows = 4, kStoredMaxRows = 4;
  using Int4 = Int4Maddubs<Avx512>;
  using Int8 = Int8Words<Avx512>;
  using Bf16 = Bf16Floats<Avx512>;
  using Fp32 = Fp32Floats<Avx512>;
};

struct Avx512Vnni : VariantDefaults {
  // Decoding a line again for each tile costs less than a trip through L1: shifts and masks run
  // in parallel with the products.
  static constexpr int kDirectRows = 12, kDirectMaxRows = 96;
  static constexpr int kStoredRows = 12, kStoredMaxRows = 96;
  static constexpr int kPrefetchLinesManyRows = 96;
  static constexpr int kNearPrefetchLines = 24, kNearPrefetchMinRows = 5;
  static constexpr int kInt4NearPrefetchMinRows = kNearPrefetchMinRows;
  using Int4 = Int4Vnni<Avx512Vnni>;
  using Int8 = Int8Vnni<Avx512Vnni>;
  using Bf16 = Bf16Floats<Avx512Vnni>;
  using Fp32 = Fp32Floats<Avx512Vnni>;
};

// Cores with AMX: what is too small for tiles runs on these.
struct Avx512Amx : VariantDefaults {
  static constexpr int kMaxBlock = 64;
  static constexpr int64_t kCachedRowBytes = 1 << 20;
  static constexpr int kBlockRows = 128, kStreamMinRows = 64;
  static constexpr int kDirectRows = 12, kDirectMaxRows = 96;
  static constexpr int kStoredRows = 12, kStoredMaxRows = 96;
  static constexpr int kPrefetchLinesManyRows = 48;
  static constexpr int kNearPrefetchLines = 0, kNearPrefetchMinRows = 0;
  // Such a core waits for its own L2 while lines are on their way to it.
  static constexpr int kInt4NearPrefetchMinRows = 2;
  using Int4 = Int4Vnni<Avx512Amx>;
  using Int8 = Int8Vnni<Avx512Amx>;
  using Bf16 = Bf16Floats<Avx512Amx>;
  using Fp32 = Fp32Floats<Avx512Amx>;
};

}  // namespace
}  // namespace ridgeline
