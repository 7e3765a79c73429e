// Attention where the CPU multiplies pairs of bfloat16 (AVX-512 BF16): bfloat16 keys and values are
// multiplied by queries and weights that are rounded to it, two products per lane and instruction.
// The odd one of a pair is added first, each product with one rounding (so on a Zen 4; the
// instruction takes subnormal numbers for zero).
//
//   keys      panel[pair of dimensions][key]    words, as they are in the cache
//   values    [pair of keys][slot]              words: the numbers of two keys, side by side
//   queries   [pair of dimensions][row]
#pragma once
#include <stdint.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/formats.h"
#include "attention/key_tile.h"
#include "simd/avx512.h"
#include "simd/avx512_bf16.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

// The numbers of two rows side by side: of dimensions 0 .. 3, 8 .. 11, ..., and of those between.
inline void interleave_rows(const char* first, const char* second, Vi (&to)[2]) {
  const Vi a = load_i(first), b = load_i(second);
  to[0] = _mm512_unpacklo_epi16(a, b);
  to[1] = _mm512_unpackhi_epi16(a, b);
}

// What dot products of bfloat16 share, by vectors and by tiles. K: a Kernel of the format.
struct RoundedBf16 : Bfloat16 {
  static constexpr bool kRoundsToBf16 = true;
  static int dim_of(int slot) {
    return slot / kPanelKeys * kPanelKeys + slot % kLanes / 4 * 8 + slot % kPanelKeys / kLanes * 4 +
           slot % 4;
  }
  static void store_scaled_slots(const float* slots, float by, float* to) {
    alignas(64) static constexpr int32_t kLow[kLanes] = {0, 1, 2, 3, 16, 17, 18, 19,
                                                         4, 5, 6, 7, 20, 21, 22, 23};
    alignas(64) static constexpr int32_t kHigh[kLanes] = {8,  9,  10, 11, 24, 25, 26, 27,
                                                          12, 13, 14, 15, 28, 29, 30, 31};
    const Vf x = mul_f(load_f(slots), set_f(by)), y = mul_f(load_f(slots + kLanes), set_f(by));
    store_f(to, _mm512_permutex2var_ps(x, load_i(kLow), y));
    store_f(to + kLanes, _mm512_permutex2var_ps(x, load_i(kHigh), y));
  }
  static void round_queries(const float* q, float unit, void* to) {
    store_i(to, to_bf16(mul_f(load_f(q), set_f(unit)), mul_f(load_f(q + kLanes), set_f(unit))));
  }

  // Keys that no row of the item sees any more, and those past the end, repeat one that is seen.
  // Their weight is zero, but the stored values are arbitrary, and pairs and tiles are
  // multiplied as a whole.
  template <class K>
  static void hide_unseen(K& k, const KeyRange& range) {
    const int hidden = k.first_key(0) - range.first_key;
    if (hidden <= 0) return;
    for (int j = 0; j < hidden; ++j) k.s.rows[j] = k.s.rows[hidden];
    for (int j = range.num_keys; j < kTileKeys; ++j) k.s.rows[j] = k.s.rows[hidden];
  }

  // 2^x for x <= 0 as exactly as eight bits can tell (to 1e-4 of it; exact at 0): a polynomial on
  // [-0.5, 0.5], and the integer part, which adding 1.5 * 2^23 leaves in the lowest bits, added to
  // the exponent. Results below the smallest normal number are meaningless, and are rounded to 0;
  // -inf and NaN become -127, whose bits are 0.
  static Vf exp2(Vf x) {
    const Vf shift = set_f(12582912.0f);
    x = max_f(x, set_f(-127.0f));
    const Vf whole = add_f(x, shift), r = sub_f(x, sub_f(whole, shift));
    Vf p = set_f(0.05500893f);
    p = fma_f(p, r, set_f(0.24221097f));
    p = fma_f(p, r, set_f(0.69328293f));
    p = fma_f(p, r, set_f(1.0f));
    return as_f(add_i(as_i(p), _mm512_slli_epi32(as_i(whole), 23)));
  }

  // Stores two vectors of weights rounded to words; returns `sum` plus the rounded weights.
  static Vf store_weights(Vf x, Vf y, Vf sum, float* to) {
    const Vi pairs = to_bf16(x, y);
    store_i(to, pairs);
    return dot_bf16(sum, pairs, set_i(0x3F803F80));  // times ones
  }
};

struct Bf16Dot : RoundedBf16 {
  static constexpr int kWordRows = 1;
  static void store_word(int32_t* at, int32_t*, Words8 v) { store_words(at, v); }
  static int num_words(int D) { return (D + 1) / 2; }

  // `count` rows from `first` on, transposed where there are kTransposeKeys of them.
  template <class K>
  static void pack_queries(K& k, int first, int count, float unit) {
    const int D = k.a.head_dim, words = num_words(D);
    alignas(64) int32_t rounded[kTransposeKeys][kMaxHeadDim / 2];
    int32_t* to = k.packed_queries(first);
    for (int r = 0; r < count; ++r) {
      const float* q = k.query(first + r);
      int d = 0;
      for (; d + kPanelKeys <= D; d += kPanelKeys) round_queries(q + d, unit, rounded[r] + d / 2);
      if (d == D) continue;
      const PaddedCopy<kPanelKeys * sizeof(float)> rest(reinterpret_cast<const char*>(q + d),
                                                        (D - d) * static_cast<int>(sizeof(float)));
      round_queries(reinterpret_cast<const float*>(rest.bytes), unit, rounded[r] + d / 2);
    }
    int w = 0;
    if (count == kTransposeKeys)
      for (; w + kTransposeWords <= words; w += kTransposeWords) {
        Words8 x[kTransposeWords];
        const auto at = [&](int r) { return reinterpret_cast<const char*>(rounded[r] + w); };
        RL_UNROLL for (int i = 0; i < kTransposeWords; ++i) x[i] =
            load_two_rows(at(i), at(kTransposeWords + i));
        transpose(x);
        RL_UNROLL for (int i = 0; i < kTransposeWords; ++i)
            store_words(to + (w + i) * kTransposeKeys, x[i]);
      }
    for (; w < words; ++w)
      for (int r = 0; r < count; ++r) to[w * count + r] = rounded[r][w];
  }

  // The values of keys j and j + 1, from `slot` on.
  template <class K>
  static void load_value_pair(const K& k, int j, int slot, Vi (&v)[2]) {
    const int64_t at = slot * kBytes + k.to_values();
    const char *first = k.s.rows[j] + at, *second = k.s.rows[j + 1] + at;
    constexpr int kPanelBytes = kPanelKeys * kBytes;
    const int left = (k.a.head_dim - slot) * kBytes;
    if (__builtin_expect(left >= kPanelBytes, 1))
      interleave_rows(first, second, v);
    else
      interleave_rows(PaddedCopy<kPanelBytes>(first, left).bytes,
                      PaddedCopy<kPanelBytes>(second, left).bytes, v);
  }
  template <class K>
  static void pack_values(K& k, int num_keys) {
    const int slots = num_slots(k.a.head_dim);
    int32_t* to = reinterpret_cast<int32_t*>(k.s.wide_values);
    for (int j = 0; j < num_keys; j += 2)
      for (int slot = 0; slot < slots; slot += kPanelKeys, to += kPanelKeys) {
        const int64_t at = slot * kBytes + k.to_values();
        Vi v[2];
        load_value_pair(k, j, slot, v);
        store_i(to, v[0]);
        store_i(to + kLanes, v[1]);
        k.prefetch_values(j, at);
        k.prefetch_values(j + 1, at);
      }
  }

  // scores[R][kTileKeys] of panels first .. end - 1.
  template <int R, class K>
  static RL_NOINLINE void score(K& k, int row, int first, int end) {
    const int32_t* q = k.packed_queries(row);
    const int words = num_words(k.a.head_dim);
    for (int p = first; p < end; ++p) {
      const int32_t* keys = k.s.key_panels + static_cast<int64_t>(p) * kPanelKeys * words;
      Vf acc[R][2];
      RL_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set_f(0.0f);
      for (int w = 0; w < words; ++w) {
        const Vi k0 = load_i(keys + w * kPanelKeys);
        const Vi k1 = load_i(keys + w * kPanelKeys + kLanes);
        RL_UNROLL for (int r = 0; r < R; ++r) {
          const Vi x = set_i(q[w * R + r]);
          acc[r][0] = dot_bf16(acc[r][0], k0, x);
          acc[r][1] = dot_bf16(acc[r][1], k1, x);
        }
      }
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i)
          store_f(k.s.scores + r * kTileKeys + p * kPanelKeys + i * kLanes, acc[r][i]);
    }
  }

  // values[row] = values[row] * rescale + sum over pairs of keys, ascending, of weight * value.
  template <int R, bool kPacked, class K>
  static RL_NOINLINE void add(K& k, int row, float* const* values, const float* rescale, int low,
                              int high) {
    const int slots = num_slots(k.a.head_dim);
    const bool prefetches = !kPacked && row == 0;  // once per tile is enough
    for (int slot = 0; slot < slots; slot += kPanelKeys) {
      const int64_t at = slot * kBytes + k.to_values();
      Vf acc[R][2];
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i) acc[r][i] =
          mul_f(load_f(values[r] + slot + i * kLanes), set_f(rescale[r]));
      const int32_t* packed =
          reinterpret_cast<const int32_t*>(k.s.wide_values) + low / 2 * slots + slot;
      const float* weight = k.s.scores + low / 2;
      for (int j = low / 2 * 2; j <= high; j += 2, ++weight, packed += slots) {
        Vi v[2];
        if constexpr (kPacked) {
          v[0] = load_i(packed);
          v[1] = load_i(packed + kLanes);
        } else {
          load_value_pair(k, j, slot, v);
        }
        RL_UNROLL for (int r = 0; r < R; ++r) {
          const Vi w = as_i(set_f(weight[r * kTileKeys]));
          acc[r][0] = dot_bf16(acc[r][0], v[0], w);
          acc[r][1] = dot_bf16(acc[r][1], v[1], w);
        }
        if (prefetches) {
          k.prefetch_values(j, at);
          k.prefetch_values(j + 1, at);
        }
      }
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i)
          store_f(values[r] + slot + i * kLanes, acc[r][i]);
    }
  }
};

}  // namespace
}  // namespace ridgeline
