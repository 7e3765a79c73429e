// A cache of E4M3 codes: stored in int8's order (code_offset), one scale per token and head, but
// multiplied as floats. Of the four codes in a lane, a shift moves one's sign and seven bits to
// where a float has its sign and the end of its exponent:
//
//   code    s eeee mmm                    value     (-1)^s * 2^(e - 7) * (1 + m / 8), for e = 0
//   float   s 0000 eeee mmm 0...                    (-1)^s * 2^-6 * m / 8
//
// which is the value times 2^-120 exactly, subnormal ones included. The rest of 2^120 is in two
// parts, so that no product leaves the range of floats: queries carry 2^100 and scores 2^20,
// weights 2^37 (a value's scale may be 1e27) and results 2^83.
#pragma once
#include <stdint.h>

#include "attention/attention.h"
#include "attention/formats.h"
#include "attention/key_tile.h"
#include "simd/compiler.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr float kFp8Query = 0x1p100f, kFp8Score = 0x1p20f;
constexpr float kFp8Weight = 0x1p37f, kFp8Result = 0x1p83f;

// The codes of byte kByte of every lane, as floats times 2^-120.
template <int kByte>
inline Vf e4m3_floats(Vi v) {
  return as_f(and_i(shift_right_signed<4>(shift_left<24 - 8 * kByte>(v)),
                    set_i(static_cast<int32_t>(0x87F00000u))));
}

struct Fp8 : OrderedSlots {
  static constexpr KvKind kKind = KvKind::kFp8;
  static constexpr bool kHasCodes = true, kIsInt8 = false, kIsFp8 = true, kIsWidened = false,
                        kRoundsToBf16 = false;
  static constexpr int kPartRows = kInt8Rows;
  static int num_words(int D) { return (D + 3) / 4; }
  static int num_slots(int D) { return round_up_to(D, kPanelKeys); }

  // Vectors that are multiplied together: with few rows four, whose sums would else wait for each
  // other.
  template <int R>
  static constexpr int kVectorsAtOnce = R == 1 || (kLanes == 16 && R == 2) ? 4 : 2;

  // acc[row] += the codes of byte kByte of V vectors times x[row * to_row].
  template <int kByte, int R, int V>
  static void add_products(Vf (&acc)[R][V], const Vi (&codes)[V], const float* x, int to_row) {
    Vf c[V];
    RL_UNROLL for (int i = 0; i < V; ++i) c[i] = e4m3_floats<kByte>(codes[i]);
    RL_UNROLL for (int r = 0; r < R; ++r) {
      const Vf by = set_f(x[r * to_row]);
      RL_UNROLL for (int i = 0; i < V; ++i) acc[r][i] = mul_add_f(by, c[i], acc[r][i]);
    }
  }

  template <int R, class K>
  RL_NOINLINE static void score(K& kernel, int row, int first, int end) {
    constexpr int kPanels = kVectorsAtOnce<R> / 2;
    int p = first;
    for (; p + kPanels <= end; p += kPanels) score_vectors<R, 2 * kPanels>(kernel, row, p);
    if constexpr (kPanels > 1)
      for (; p < end; ++p) score_vectors<R, 2>(kernel, row, p);
  }

  // Scores of V vectors of keys, from panel `p` on.
  template <int R, int V, class K>
  static void score_vectors(K& kernel, int row, int p) {
    auto& s = kernel.s;
    const float* q = reinterpret_cast<const float*>(kernel.packed_queries(row));
    const char* k[V];
    Vf acc[R][V];
    RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < V; ++i) acc[r][i] =
        set_f(0.0f);
    RL_UNROLL for (int i = 0; i < V; ++i) k[i] = s.codes.at->words[2 * p + i] + s.codes.shift;
    constexpr int kPrefetches = kPrefetchesPerWord * V / 2;
    const int which = p * kPanelKeys / kPrefetchKeys, num_words = num_words_of(kernel);
    const char* const* near = s.near_prefetch.at->keys + which;
    const char* const* far = s.far_prefetch.at->keys + which;
    int64_t to_near = s.near_prefetch.shift, to_far = s.far_prefetch.shift;
    for (int w = 0; w < num_words; ++w, q += 4 * R) {
      Vi codes[V];
      RL_UNROLL for (int i = 0; i < V; ++i) {
        codes[i] = load_i(k[i]);
        k[i] += s.codes.at->stride;
      }
      add_products<0, R, V>(acc, codes, q, 1);
      add_products<1, R, V>(acc, codes, q + R, 1);
      add_products<2, R, V>(acc, codes, q + 2 * R, 1);
      add_products<3, R, V>(acc, codes, q + 3 * R, 1);
      RL_UNROLL for (int i = 0; i < kPrefetches; ++i) {
        prefetch_to_l1(near[i] + to_near);
        prefetch_to_l2(far[i] + to_far);
      }
      to_near += kLineBytes;
      to_far += kLineBytes;
    }
    RL_UNROLL for (int i = 0; i < V; ++i) {
      const Vf scale =
          mul_f(kernel.load_scales(s.codes.at->key_scales[2 * p + i]), set_f(kFp8Score));
      float* to = s.scores + p * kPanelKeys + i * kLanes;
      RL_UNROLL for (int r = 0; r < R; ++r) store_f(to + r * kTileKeys, mul_f(acc[r][i], scale));
    }
  }

  template <int R, class K>
  RL_NOINLINE static void add(K& kernel, float* const* values, const float* rescale, int low,
                              int high) {
    constexpr int kStep = kVectorsAtOnce<R> * kLanes;
    const int slots = num_slots(kernel.a.head_dim);
    int slot = 0;
    for (; slot + kStep <= slots; slot += kStep)
      add_value_vectors<R, kStep / kLanes>(kernel, slot, values, rescale, low, high);
    if constexpr (kStep > kPanelKeys)
      for (; slot < slots; slot += kPanelKeys)
        add_value_vectors<R, 2>(kernel, slot, values, rescale, low, high);
  }

  // V vectors of slots, from `slot` on. The bytes of a lane are tokens 0 2 1 3, added in order.
  template <int R, int V, class K>
  static void add_value_vectors(K& kernel, int slot, float* const* values, const float* rescale,
                                int low, int high) {
    auto& s = kernel.s;
    Vf acc[R][V];
    RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < V; ++i) acc[r][i] =
        mul_f(load_f(values[r] + slot + i * kLanes), set_f(rescale[r]));
    const float* w = s.scores + low / 4 * 4;
    for (int quad = low / 4; quad <= high / 4; ++quad, w += 4) {
      const char* at = s.codes.at->quads[quad] + s.codes.shift + 4 * slot;
      Vi codes[V];
      RL_UNROLL for (int i = 0; i < V; ++i) codes[i] = load_i(at + 4 * kLanes * i);
      add_products<0, R, V>(acc, codes, w, kTileKeys);
      add_products<2, R, V>(acc, codes, w + 1, kTileKeys);
      add_products<1, R, V>(acc, codes, w + 2, kTileKeys);
      add_products<3, R, V>(acc, codes, w + 3, kTileKeys);
      const int which = 4 * quad / kPrefetchKeys;
      const int line = kPrefetchKeys * slot + V * kLanes * 4 * (quad % 4);
      RL_UNROLL for (int i = 0; i < 4 * V * kLanes; i += kLineBytes) {
        prefetch_to_l1(s.near_prefetch.at->values[which] + s.near_prefetch.shift + line + i);
        prefetch_to_l2(s.far_prefetch.at->values[which] + s.far_prefetch.shift + line + i);
      }
    }
    RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < V; ++i)
        store_f(values[r] + slot + i * kLanes, acc[r][i]);
  }

 private:
  template <class K>
  static int num_words_of(const K& kernel) {
    return num_words(kernel.a.head_dim);
  }
};

}  // namespace
}  // namespace ridgeline
