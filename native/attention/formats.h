// How each format of the cache meets the arithmetic: keys are packed so that a vector holds one
// dimension of several keys, values are read so that it holds several dimensions of one. A panel is
// kPanelKeys keys:
//
//   float formats   panel[d][key]  floats
//   int8            as the cache holds it (code_offset): of each key a word of four bytes a b c d,
//                   dimensions 4w .. 4w + 3, the keys' words side by side: a mask leaves the 16-bit
//                   words (a, c), a shift (b, d)
//   fp8             the same order (fp8.h)
//
// Codes are offset by 128, because unsigned bytes widen without shuffles; sums start at
// -128 * sum(query). Four int8 values of a dimension are the bytes of keys 0, 2, 1, 3, so that
// neighbours pair. A slot is a place among a row's sums; `dim_of` says which dimension it holds.
#pragma once
#include <stdint.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/key_tile.h"
#include "simd/compiler.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

// Query rows whose sums stay in registers, two vectors each. Of floats, with AVX2: 6 rows x 2 sums,
// 2 vectors of keys and 1 of the query make 15 of 16 registers. Of integers: 8 sums, 4 vectors of
// keys, the query, a product and a mask make 15.
constexpr int kFloatRows = kLanes == 16 ? 8 : kLanes == 8 ? 6 : 4;
constexpr int kInt8Rows = kLanes == 16 ? 8 : 4;

constexpr int kTransposeKeys = 8, kTransposeWords = 4;  // transposed at once

// Formats that are multiplied by vectors.
struct VectorFormat {
  static constexpr bool kUsesTiles = false;
  struct TileScope {  // held while an item is computed
    explicit TileScope(int /*num_rows*/) {}
  };
};

struct OrderedSlots : VectorFormat {  // slots in the order of dimensions
  static int dim_of(int slot) { return slot; }
  // kPanelKeys slots times `by`, to their dimensions.
  static void store_scaled_slots(const float* slots, float by, float* to) {
    store_f(to, mul_f(load_f(slots), set_f(by)));
    store_f(to + kLanes, mul_f(load_f(slots + kLanes), set_f(by)));
  }
};

struct FloatFormat : OrderedSlots {
  static constexpr bool kHasCodes = false, kIsInt8 = false, kIsFp8 = false, kIsWidened = false,
                        kRoundsToBf16 = false;
  static constexpr int kPartRows = kFloatRows;
  static int num_words(int D) { return D; }
  static int num_slots(int D) { return round_up_to(D, kPanelKeys); }
};

// kLoadBytes bytes of a key become kTransposeWords words; each word fills kWordRows rows of a
// panel.
struct Float32 : FloatFormat {
  static constexpr KvKind kKind = KvKind::kFloat32;
  static constexpr int kBytes = 4;
  static void load(const char* p, Vf (&v)[2]) {
    v[0] = load_f(reinterpret_cast<const float*>(p));
    v[1] = load_f(reinterpret_cast<const float*>(p) + kLanes);
  }
  static constexpr int kLoadBytes = 16, kWordRows = 1;
  static Words8 load_words(const char* low, const char* high) { return load_two_rows(low, high); }
  static void store_word(int32_t* at, int32_t*, Words8 v) { store_words(at, v); }
};

struct Float16 : FloatFormat {
  static constexpr KvKind kKind = KvKind::kFloat16;
  static constexpr int kBytes = 2;
  static void load(const char* p, Vf (&v)[2]) {
    v[0] = load_f16(p);
    v[1] = load_f16(p + 2 * kLanes);
  }
  static constexpr int kLoadBytes = 8, kWordRows = 1;
  static Words8 load_words(const char* low, const char* high) {
    return load_two_rows_f16(low, high);
  }
  static void store_word(int32_t* at, int32_t*, Words8 v) { store_words(at, v); }
};

struct Bfloat16 : FloatFormat {
  static constexpr KvKind kKind = KvKind::kBfloat16;
  static constexpr int kBytes = 2;
  static int num_words(int D) { return (D + 1) / 2 * 2; }
  // Of each kPanelKeys dimensions the even ones first, then the odd ones.
  static int dim_of(int slot) {
    return slot / kPanelKeys * kPanelKeys + slot % kLanes * 2 + slot % kPanelKeys / kLanes;
  }
  static void store_scaled_slots(const float* __restrict slots, float by, float* __restrict to) {
    for (int i = 0; i < kLanes; ++i) {
      to[2 * i] = slots[i] * by;
      to[2 * i + 1] = slots[kLanes + i] * by;
    }
  }
  static void load(const char* p, Vf (&v)[2]) {
    const Vi pairs = load_i(p);
    v[0] = as_f(lower_words(pairs));
    v[1] = as_f(upper_words(pairs));
  }
  static constexpr int kLoadBytes = 16, kWordRows = 2;
  static Words8 load_words(const char* low, const char* high) { return load_two_rows(low, high); }
  static void store_word(int32_t* at, int32_t* next, Words8 v) {
    store_words(at, lower_words(v));
    store_words(next, upper_words(v));
  }
};

template <bool kVnni>
struct Int8 : OrderedSlots {
  static constexpr KvKind kKind = KvKind::kInt8;
  static constexpr bool kHasCodes = true, kIsInt8 = true, kIsFp8 = false, kIsWidened = false,
                        kRoundsToBf16 = false;
  static constexpr int kPartRows = kInt8Rows;
  static int num_words(int D) { return (D + 3) / 4; }
  static int num_slots(int D) { return round_up_to(D, kPanelKeys); }
  static Vi dot(Vi sum, Vi a, Vi b) { return dot_i16<kVnni>(sum, a, b); }
};

// Codes are widened once per tile, where many rows will read them: the same sums.
template <bool kVnni>
struct WidenedInt8 : Int8<kVnni> {
  static constexpr bool kIsWidened = true;
  static constexpr int kPartRows = kFloatRows;
};

// Packs kTransposeWords words of kTransposeKeys keys, from byte `at` of their rows on.
template <class F>
inline void pack_words(const char* const* rows, int at, int32_t* to) {
  Words8 w[kTransposeWords];
  RL_UNROLL for (int i = 0; i < kTransposeWords; ++i) w[i] =
      F::load_words(rows[i] + at, rows[kTransposeWords + i] + at);
  transpose(w);
  RL_UNROLL for (int i = 0; i < kTransposeWords; ++i) F::store_word(
      to + i * F::kWordRows * kPanelKeys, to + (i * F::kWordRows + 1) * kPanelKeys, w[i]);
}

// The same for the last words of the rows, which may be fewer.
template <class F>
inline void pack_last_words(const char* const* rows, int at, int row_bytes, int num_words,
                            int32_t* to) {
  Words8 w[kTransposeWords];
  for (int i = 0; i < kTransposeWords; ++i) {
    const PaddedCopy<F::kLoadBytes> low(rows[i] + at, row_bytes - at);
    const PaddedCopy<F::kLoadBytes> high(rows[kTransposeWords + i] + at, row_bytes - at);
    w[i] = F::load_words(low.bytes, high.bytes);
  }
  transpose(w);
  for (int i = 0; i * F::kWordRows < num_words; ++i, to += F::kWordRows * kPanelKeys)
    F::store_word(to, to + kPanelKeys, w[i]);
}

// Packs kPanelKeys keys. kNearKeys more of `rows` must be readable; every line of as many other
// keys, `next`, is prefetched.
template <class F>
void pack_panel(const char* const* rows, const char* const* next, int D, int32_t* panel) {
  constexpr int kPerStep = kTransposeWords * F::kWordRows;
  const int bytes = D * F::kBytes, end = bytes / F::kLoadBytes * F::kLoadBytes;
  const int rest = F::num_words(D) % kPerStep;
  for (int key = 0; key < kPanelKeys; key += kTransposeKeys) {
    int32_t* to = panel + key;
    for (int at = 0; at < end; at += F::kLoadBytes, to += kPerStep * kPanelKeys) {
      if (at % kLineBytes == 0)
        for (int i = key; i < key + kTransposeKeys; ++i) {
          prefetch_to_l2(next[i] + at);
          prefetch_to_l1(rows[i + kNearKeys] + at);
        }
      pack_words<F>(rows + key, at, to);
    }
    if (end < bytes) pack_last_words<F>(rows + key, end, bytes, rest ? rest : kPerStep, to);
  }
}

// Widens a vector of codes into its even bytes and its odd ones.
inline void widen_codes(const char* from, int32_t* to) {
  const Vi v = load_i(from);
  store_i(to, even_bytes(v));
  store_i(to + kLanes, odd_bytes(v));
}

}  // namespace
}  // namespace ridgeline
