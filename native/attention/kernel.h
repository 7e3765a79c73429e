// The attention kernel. Decode, chunks and prefill take the same way, for every format of the cache
// (formats.h): a tile of kTileKeys keys is packed into L1 with keys in lanes (int8 is stored so);
// then, a few query rows at a time, scores, online softmax and weighted values. Query heads of a
// group share the tile, so that keys and values are read from memory once.
//
// fp8: codes are turned into floats in registers (fp8.h).
//
// int8: queries and weights are rounded to 16 bits per row (and tile), so that both products run on
// integers, twice as many per instruction as floats. At 16 bits that rounding is small compared with
// the cache's (an estimate; the conformance suite bounds the sum of both).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/formats.h"
#include "attention/fp8.h"
#include "attention/key_tile.h"
#include "attention/scratch.h"
#include "simd/compiler.h"
#include "simd/math.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr int kMaxWord = 32767;
// Bytes between the position computed and the position prefetched into L2, rounded up to whole tiles of a
// head: memory shared by two cores takes several hundred ns, and L2 holds many times that.
constexpr int kPrefetchBytes = 24 << 10;
constexpr int kPrefetchQueries = 2;  // rows prefetched at a time

// The position of an item's row r, the first key it sees, and the chunks that its rows see keys of.
inline int position_of(const AttentionArgs& a, const AttentionItem& item, int r) {
  return a.computed[item.run] + (item.first_row + r) / (a.num_heads / a.num_kv_heads);
}
inline int first_key_of(const AttentionArgs& a, const AttentionItem& item, int r) {
  const int first = position_of(a, item, r) - a.window + 1;
  return a.window > 0 && first > 0 ? first : 0;
}
inline int first_chunk(const AttentionArgs& a, const AttentionItem& item) {
  return first_key_of(a, item, 0) / kChunkKeys;
}
inline int end_chunk(const AttentionArgs& a, const AttentionItem& item) {
  return position_of(a, item, item.num_rows - 1) / kChunkKeys + 1;
}

// F: a format. S: the variant's Scratch.
template <class F, class S>
struct Kernel {
  const AttentionArgs& a;
  S& s;
  AttentionItem item;
  int head = 0;  // among the item's kv heads

  int base() const { return head * item.num_rows; }  // first row of the head among the item's
  int group() const { return a.num_heads / a.num_kv_heads; }
  int last_key(int r) const { return s.last_key[r]; }
  int first_key(int r) const { return s.first_key[r]; }
  const float* query(int r) const {
    const int flat = item.first_row + r;
    const int64_t row = a.row_start[item.run] + flat / group();
    return a.q + row * a.q_stride_row +
           ((item.kv_head + head) * group() + flat % group()) * a.q_stride_head;
  }

  // Which keys each row sees, and the item's rows in as few parts of up to F::kPartRows as
  // possible, as evenly as possible: once per item, because a division costs as much as several
  // keys.
  void plan_rows() {
    for (int r = 0; r < item.num_rows; ++r) {
      s.last_key[r] = position_of(a, item, r);
      s.first_key[r] = first_key_of(a, item, r);
    }
    s.num_parts = (item.num_rows + F::kPartRows - 1) / F::kPartRows;
    for (int part = 0; part <= s.num_parts; ++part)
      s.part[part] = item.num_rows * part / s.num_parts;
  }
  int query_words() const {
    return F::num_words(a.head_dim) * (F::kIsInt8 ? 2 : F::kIsFp8 ? 4 : 1);
  }
  int32_t* packed_queries(int first) const { return s.queries + (base() + first) * query_words(); }

  // Packs queries in the order in which they are multiplied, scaled so that a weight is 2^score.
  void pack_queries() {
    float unit = a.softcap > 0 ? a.scale : a.scale * kLog2E;
    if constexpr (F::kIsFp8) unit *= kFp8Query;
    plan_rows();
    for (head = 0; head < item.num_kv; ++head)
      for (int part = 0; part < s.num_parts; ++part) {
        const int first = s.part[part], count = s.part[part + 1] - first;
        if constexpr (F::kUsesTiles) {
          F::pack_queries(*this, part, unit);
          continue;
        } else if constexpr (F::kRoundsToBf16) {
          F::pack_queries(*this, first, count, unit);
          continue;
        }
        if (!F::kIsInt8 && count == kTransposeKeys && a.head_dim % kTransposeWords == 0) {
          pack_queries_transposed(first, unit);
          continue;
        }
        for (int r = 0; r < count; ++r)
          pack_query(first + r, packed_queries(first) + r, count, unit);
      }
  }

  // Prefetches some queries of the item that comes next: they are a token apart, which no hardware
  // prefetcher foresees.
  void prefetch_queries() {
    if (!s.next_item) return;
    Kernel next = {a, s, *s.next_item};
    const int bytes = 4 * a.head_dim, all = s.next_item->all_rows();
    for (int n = 0; n < kPrefetchQueries && s.next_row < all; ++n, ++s.next_row) {
      next.head = s.next_row / s.next_item->num_rows;
      const char* q = reinterpret_cast<const char*>(next.query(s.next_row % s.next_item->num_rows));
      for (int byte = 0; byte < bytes; byte += kLineBytes) prefetch_to_l2(q + byte);
    }
  }

  // kTransposeKeys rows from `first` on.
  void pack_queries_transposed(int first, float unit) {
    static_assert(kTransposeKeys == 2 * kTransposeWords, "two rows per register");
    float* to = reinterpret_cast<float*>(packed_queries(first));
    const char* q[kTransposeKeys];
    for (int r = 0; r < kTransposeKeys; ++r) q[r] = reinterpret_cast<const char*>(query(first + r));
    for (int d = 0; d < a.head_dim; d += kTransposeWords, to += kTransposeWords * kTransposeKeys) {
      Words8 w[kTransposeWords];
      RL_UNROLL for (int i = 0; i < kTransposeWords; ++i) w[i] =
          load_two_rows(q[i] + 4 * d, q[kTransposeWords + i] + 4 * d);
      transpose(w);
      RL_UNROLL for (int i = 0; i < kTransposeWords; ++i)
          store_scaled(to + i * kTransposeKeys, w[i], unit);
    }
  }

  void pack_query(int row, int32_t* to, int stride, float unit) {
    const int D = a.head_dim;
    if constexpr (!F::kIsInt8) {
      const float* q = query(row);
      for (int d = 0; d < D; ++d) {
        const float x = q[d] * unit;
        memcpy(to + d * stride, &x, sizeof x);
      }
      for (int d = D; d < query_words(); ++d) to[d * stride] = 0;
    } else {
      alignas(64) int32_t codes[kMaxHeadDim + kLanes];
      quantise_query(row, unit, codes);
      for (int d = 0; d < D; d += 4, to += 2 * stride) {
        to[0] = (codes[d] & 0xFFFF) | codes[d + 2] * 65536;
        to[stride] = (codes[d + 1] & 0xFFFF) | codes[d + 3] * 65536;
      }
    }
  }

  // int8: a query as integers of 16 bits, their sum, and the factor of a product of codes.
  void quantise_query(int row, float unit, int32_t* codes) {
    const int D = a.head_dim;
    alignas(64) float x[kMaxHeadDim + kLanes] = {};
    memcpy(x, query(row), sizeof(float) * D);
    Vf max = set_f(0.0f);
    for (int d = 0; d < D; d += kLanes) max = max_f(abs_f(load_f(x + d)), max);
    const float top = reduce_max(max), inverse = top > 1e-30f ? kMaxWord / top : 0.0f;
    s.factor[base() + row] = top / kMaxWord * unit;
    Vi sum = set_i(0);
    for (int d = 0; d < D; d += kLanes) {
      const Vi code = to_i(mul_f(load_f(x + d), set_f(inverse)));
      sum = add_i(sum, code);
      store_i(codes + d, code);
    }
    s.query_sum[base() + row] = reduce_add(sum);
  }

  int64_t to_values() const { return a.v - a.k; }

  // int8 read by few rows: codes are read where they are in the cache, if they fit vectors.
  static constexpr bool kReadsInPlace = F::kHasCodes && !F::kIsWidened && !F::kUsesTiles;

  void locate_tile(int first_key, int num_keys, KeyTile& to) const {
    const char* k = a.k + item.kv_head * a.stride_head;
    const int32_t* table = a.table;
    const int table_start = a.table_start[item.run];
    const int row = static_cast<int>(row_bytes(a.kind, a.head_dim));
    int block = first_key / a.block_size, within = first_key % a.block_size;
    to.num_keys = num_keys;
    to.num_spans = 0;
    for (int j = 0; j < num_keys; ++block, within = 0) {
      const int left = a.block_size - within, count = left < num_keys - j ? left : num_keys - j;
      const int offset = F::kHasCodes ? 0 : within * row;
      const int bytes = (F::kHasCodes ? a.block_size : count) * row;
      const char* data = k + table[table_start + block] * a.stride_block;
      to.spans[to.num_spans++] = {data, j, count, within, offset, bytes};
      j += count;
    }
    if constexpr (kReadsInPlace) {
      to.is_in_place = num_keys == kTileKeys && keys_fit_vectors() && values_fit_vectors();
      if (to.is_in_place) locate_codes(to);
      locate_prefetch(to);
    }
  }

  // Whether vectors of codes can be loaded from the cache as they are.
  bool keys_fit_vectors() const { return a.block_size % kLanes == 0 && a.head_dim % 4 == 0; }
  bool values_fit_vectors() const {
    return a.block_size % 4 == 0 && a.head_dim == F::num_slots(a.head_dim);
  }

  void locate_codes(KeyTile& to) const {
    const int64_t codes = static_cast<int64_t>(a.head_dim) * a.block_size;
    to.places.stride = 4 * a.block_size;
    for (int i = 0; i < to.num_spans; ++i) {
      const BlockSpan& span = to.spans[i];
      for (int n = 0; n < span.count; n += kLanes) {
        const int j = span.first + n, t = span.within + n;
        const char *keys = span.data, *values = keys + to_values();
        to.places.words[j / kLanes] = keys + 4 * t;
        to.places.key_scales[j / kLanes] = keys + codes + 4 * t;
        to.places.value_scales[j / kLanes] = values + codes + 4 * t;
        for (int k = 0; k < kLanes; k += 4)
          to.places.quads[(j + k) / 4] = values + static_cast<int64_t>(t + k) * a.head_dim;
      }
    }
  }

  void locate_prefetch(KeyTile& to) const {
    constexpr int kNum = kTileKeys / kPrefetchKeys;
    const int64_t bytes = row_bytes(a.kind, a.head_dim);
    int n = 0;
    for (int i = 0; i < to.num_spans; ++i) {
      const BlockSpan& span = to.spans[i];
      for (int t = span.within; t < span.within + span.count && n < kNum; t += kPrefetchKeys, ++n) {
        to.prefetch.keys[n] = span.data + t * bytes;
        to.prefetch.values[n] = to.prefetch.keys[n] + to_values();
      }
    }
    for (; n < kNum; ++n) {
      to.prefetch.keys[n] = to.prefetch.keys[0];
      to.prefetch.values[n] = to.prefetch.values[0];
    }
  }

  // A tile of one head.
  struct HeadTile {
    const KeyTile& tile;
    int head;
  };

  // Heads' tiles from the one that is computed to the one that is prefetched.
  int tiles_ahead() const {
    const int bytes = 2 * kTileKeys * static_cast<int>(row_bytes(a.kind, a.head_dim));
    const int tiles = (kPrefetchBytes + bytes - 1) / bytes;
    return tiles < item.num_kv ? tiles : item.num_kv;
  }
  HeadTile tile_ahead(const KeyTile& here, const KeyTile& next, int ahead) const {
    const int at = head + ahead;
    if (at < item.num_kv) return {here, at};
    if (next.num_spans) return {next, at - item.num_kv};
    return {here, head};  // nothing is left: prefetch lines that are read anyway
  }

  // From now on tiles ahead are prefetched: line by line as lines are read or, where a packed or
  // widened tile is read instead, through the queue in about as many calls as there will be.
  void plan_prefetch(const KeyTile& here, const KeyTile& next) {
    if constexpr (F::kUsesTiles) {  // each step says how many lines
      s.prefetch = queue_of(tile_ahead(here, next, F::kIsInt8 ? tiles_ahead() : 1), 0);
    } else if constexpr (!F::kHasCodes) {
      const HeadTile far = tile_ahead(here, next, tiles_ahead());
      locate_rows(far.tile, far.head, s.next_rows);
    } else if constexpr (!F::kIsWidened) {
      s.near_prefetch = prefetch_of(tile_ahead(here, next, 1));
      s.far_prefetch = prefetch_of(tile_ahead(here, next, tiles_ahead()));
    } else {
      constexpr int kCalls = kTileKeys / kPanelKeys + kTileKeys / 4;
      s.prefetch = queue_of(tile_ahead(here, next, 1), tile_lines() / kCalls + 1);
    }
  }
  int tile_lines() const {  // of keys and values
    return 2 * kTileKeys * static_cast<int>(row_bytes(a.kind, a.head_dim)) / kLineBytes;
  }
  PrefetchQueue queue_of(const HeadTile& tile, int lines_per_call) const {
    return {&tile.tile, tile.head * a.stride_head, to_values(), 0, lines_per_call, nullptr,
            nullptr};
  }
  OfHead<PrefetchPlaces> prefetch_of(const HeadTile& tile) const {
    return {&tile.tile.prefetch, tile.head * a.stride_head};
  }

  // Packs the tile's keys into panels, and values as far as they need it.
  void pack_tile(const KeyTile& tile, const KeyRange& range) {
    if constexpr (F::kHasCodes) {
      if (kReadsInPlace && tile.is_in_place) {
        s.codes = {&tile.places, head * a.stride_head};
        return;
      }
      load_codes(tile);
      s.codes = {&s.copied, 0};
      if constexpr (F::kIsWidened) widen_tile(tile.num_keys);
    } else {
      locate_rows(tile, head, s.rows);
      if constexpr (F::kRoundsToBf16) F::hide_unseen(*this, range);
      for (int j = 0; j < range.num_keys; j += kPanelKeys)
        pack_panel<F>(s.rows + j, s.next_rows + j, a.head_dim,
                      s.key_panels + j * F::num_words(a.head_dim));
      if (!packs_values()) return;
      if constexpr (F::kRoundsToBf16)
        F::pack_values(*this, range.num_keys);
      else
        widen_values(range.num_keys);
    }
  }

  // Keys past the end repeat one that exists: they are masked, but their loads must be valid.
  void locate_rows(const KeyTile& tile, int of_head, const char** to) const {
    const int64_t bytes = row_bytes(a.kind, a.head_dim);
    int j = 0;
    for (int i = 0; i < tile.num_spans; ++i) {
      const char* row = tile.spans[i].data + tile.spans[i].offset + of_head * a.stride_head;
      for (int n = tile.spans[i].count; n > 0; --n, row += bytes) to[j++] = row;
    }
    for (; j < kTileKeys + kNearKeys; ++j) to[j] = to[0];
  }

  // Vectors of codes are loaded from the cache as they are, where blocks and heads fit vectors;
  // else from a copy.
  void load_codes(const KeyTile& tile) {
    const int D = a.head_dim, B = a.block_size, slots = F::num_slots(D);
    char* panels = reinterpret_cast<char*>(s.key_panels);
    char* quads = reinterpret_cast<char*>(s.value_quads);
    for (int i = 0; i < tile.num_spans; ++i) {
      const BlockSpan& span = tile.spans[i];
      const char *keys = span.data + head * a.stride_head, *values = keys + to_values();
      const int end = span.first + span.count, to_t = span.within - span.first;
      if (keys_fit_vectors()) {
        for (int j = span.first; j < end; j += kLanes)
          s.copied.words[j / kLanes] = keys + 4 * (j + to_t);
      } else {
        copy_keys(keys, span, panels);
      }
      if (values_fit_vectors()) {
        for (int j = span.first; j < end; j += 4)
          s.copied.quads[j / 4] = values + static_cast<int64_t>(j + to_t) * D;
      } else {
        copy_values(values, span, quads);
      }
      const int64_t scales = static_cast<int64_t>(D) * B + 4 * span.within;
      copy_scales(keys + scales, span, s.key_scales);
      copy_scales(values + scales, span, s.value_scales);
    }
    for (int j = keys_fit_vectors() ? round_up_to(tile.num_keys, kLanes) : 0; j < kTileKeys;
         j += kLanes)
      s.copied.words[j / kLanes] = keys_fit_vectors() ? s.copied.words[0] : panels + 4 * j;
    if (!values_fit_vectors())
      for (int j = 0; j < kTileKeys; j += 4)
        s.copied.quads[j / 4] = quads + static_cast<int64_t>(j) * slots;
    s.copied.stride = 4 * (keys_fit_vectors() ? B : kTileKeys);
    clear_scales(tile.num_keys);
    for (int i = 0; i < kTileKeys / kLanes; ++i) {
      s.copied.key_scales[i] = reinterpret_cast<const char*>(s.key_scales + i * kLanes);
      s.copied.value_scales[i] = reinterpret_cast<const char*>(s.value_scales + i * kLanes);
    }
  }

  void copy_keys(const char* keys, const BlockSpan& span, char* to) const {
    const int D = a.head_dim, B = a.block_size, whole = D / 4 * 4;
    for (int n = 0; n < span.count; ++n) {
      const int j = span.first + n, t = span.within + n;
      for (int d = 0; d < whole; d += 4)
        memcpy(to + d * kTileKeys + 4 * j, keys + static_cast<int64_t>(d) * B + 4 * t, 4);
      for (int d = whole; d < D; ++d)
        to[whole * kTileKeys + 4 * j + d % 4] = keys[code_offset(KvSide::kKeys, B, D, t, d)];
    }
  }

  void copy_values(const char* values, const BlockSpan& span, char* to) const {
    const int D = a.head_dim, B = a.block_size, slots = F::num_slots(D), step = B % 4 ? 1 : 4;
    for (int n = 0; n < span.count; n += step) {
      const int j = span.first + n, t = span.within + n;
      if (step == 4) {
        memcpy(to + static_cast<int64_t>(j) * slots, values + static_cast<int64_t>(t) * D,
               static_cast<size_t>(4 * D));
        continue;
      }
      for (int d = 0; d < D; ++d)
        to[code_offset(KvSide::kValues, kTileKeys, slots, j, d)] =
            values[code_offset(KvSide::kValues, B, D, t, d)];
    }
  }

  static void copy_scales(const char* from, const BlockSpan& span, float* to) {
    if (span.count % kLanes) {
      memcpy(to + span.first, from, sizeof(float) * static_cast<size_t>(span.count));
    } else {
      for (int n = 0; n < span.count; n += kLanes)
        store_f(to + span.first + n, load_f(reinterpret_cast<const float*>(from) + n));
    }
  }

  // What is behind the last key was never written, or by another sequence.
  void clear_scales(int num_keys) {
    for (int j = num_keys; j < kTileKeys; ++j) s.key_scales[j] = s.value_scales[j] = 0.0f;
  }

  void widen_tile(int num_keys) {
    const int num_words = F::num_words(a.head_dim), slots = F::num_slots(a.head_dim);
    int32_t* to = s.wide_key_panels;
    for (int j = 0; j < num_keys; j += kPanelKeys) {
      for (int w = 0; w < num_words; ++w)
        for (int i = 0; i < 2; ++i, to += 2 * kLanes)
          widen_codes(s.copied.words[j / kLanes + i] + w * s.copied.stride, to);
      s.prefetch.issue();
    }
    to = s.wide_value_quads;
    for (int j = 0; j < num_keys; j += 4) {
      for (int slot = 0; slot < slots; slot += kLanes, to += 2 * kLanes)
        widen_codes(s.copied.quads[j / 4] + 4 * slot, to);
      s.prefetch.issue();
    }
  }

  // scores[R][kTileKeys] of panels first .. end - 1: R rows share the loads of the keys, never a
  // sum.
  template <int R>
  void score_floats(int row, int first, int end) {
    const float* q = reinterpret_cast<const float*>(packed_queries(row));
    const int D = a.head_dim;
    for (int p = first; p < end; ++p) {
      const float* k = reinterpret_cast<const float*>(s.key_panels) +
                       static_cast<int64_t>(p) * kPanelKeys * F::num_words(D);
      Vf acc[R][2];
      RL_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set_f(0.0f);
      for (int d = 0; d < D; ++d) {
        const Vf k0 = load_f(k + d * kPanelKeys), k1 = load_f(k + d * kPanelKeys + kLanes);
        RL_UNROLL for (int r = 0; r < R; ++r) {
          const Vf x = set_f(q[d * R + r]);
          acc[r][0] = mul_add_f(x, k0, acc[r][0]);
          acc[r][1] = mul_add_f(x, k1, acc[r][1]);
        }
      }
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i)
          store_f(s.scores + r * kTileKeys + p * kPanelKeys + i * kLanes, acc[r][i]);
    }
  }

  // Vectors of codes that are multiplied together: with one or two rows four, whose sums would else
  // wait for each other.
  template <int R>
  static constexpr int kVectorsAtOnce = kLanes == 16 && R <= 2 && !F::kIsWidened ? 4 : 2;

  // acc[row] += V vectors of four bytes per lane, at[i] (widened: the even bytes, then the odd ones
  // of each), times the row's words at q[row * to_row] (for bytes 0 and 2) and `to_odd` further
  // (for bytes 1 and 3).
  template <int R, int V>
  static void multiply_codes(Vi (&acc)[R][V], const char* const (&at)[V], const int32_t* q,
                             int to_row, int to_odd) {
    Vi bytes[V];
    RL_UNROLL for (int i = 0; i < V; ++i) bytes[i] = load_i(at[i]);
    RL_UNROLL for (int odd = 0; odd < 2; ++odd) {
      Vi words[V];
      RL_UNROLL for (int i = 0; i < V; ++i) {
        if constexpr (F::kIsWidened)
          words[i] = odd ? load_i(at[i] + 4 * kLanes) : bytes[i];
        else
          words[i] = odd ? odd_bytes(bytes[i]) : even_bytes(bytes[i]);
      }
      RL_UNROLL for (int r = 0; r < R; ++r) {
        const Vi x = set_i(q[r * to_row + odd * to_odd]);
        RL_UNROLL for (int i = 0; i < V; ++i) acc[r][i] = F::dot(acc[r][i], words[i], x);
      }
    }
  }

  template <int R>
  RL_NOINLINE void score_int8(int row, int first, int end) {
    constexpr int kPanels = kVectorsAtOnce<R> / 2;
    int p = first;
    for (; p + kPanels <= end; p += kPanels) score_vectors<R, 2 * kPanels>(row, p);
    if constexpr (kPanels > 1)
      for (; p < end; ++p) score_vectors<R, 2>(row, p);
  }

  Vf load_scales(const char* of_first_head) const {
    return load_f(reinterpret_cast<const float*>(of_first_head + s.codes.shift));
  }

  // Scores of V vectors of keys, from panel `p` on.
  template <int R, int V>
  void score_vectors(int row, int p) {
    const int32_t *q = packed_queries(row), *sums = s.query_sum + base() + row;
    const float* factors = s.factor + base() + row;
    const int num_words = F::num_words(a.head_dim);
    Vi acc[R][V];
    RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < V; ++i) acc[r][i] =
        set_i(-128 * sums[r]);
    const char* k[V];
    if constexpr (F::kIsWidened) {
      const char* wide =
          reinterpret_cast<const char*>(s.wide_key_panels + 2 * p * kPanelKeys * num_words);
      for (int w = 0; w < num_words; ++w) {
        RL_UNROLL for (int i = 0; i < V; ++i, wide += 8 * kLanes) k[i] = wide;
        multiply_codes<R, V>(acc, k, q + w * 2 * R, 1, R);
      }
    } else {
      RL_UNROLL for (int i = 0; i < V; ++i) k[i] = s.codes.at->words[2 * p + i] + s.codes.shift;
      constexpr int kPrefetches = kPrefetchesPerWord * V / 2;
      const int which = p * kPanelKeys / kPrefetchKeys;
      const char* const* near = s.near_prefetch.at->keys + which;
      const char* const* far = s.far_prefetch.at->keys + which;
      int64_t to_near = s.near_prefetch.shift, to_far = s.far_prefetch.shift;
      for (int w = 0; w < num_words; ++w) {
        multiply_codes<R, V>(acc, k, q + w * 2 * R, 1, R);
        RL_UNROLL for (int i = 0; i < V; ++i) k[i] += s.codes.at->stride;
        RL_UNROLL for (int i = 0; i < kPrefetches; ++i) {
          prefetch_to_l1(near[i] + to_near);
          prefetch_to_l2(far[i] + to_far);
        }
        to_near += kLineBytes;
        to_far += kLineBytes;
      }
    }
    RL_UNROLL for (int i = 0; i < V; ++i) {
      const Vf scale = load_scales(s.codes.at->key_scales[2 * p + i]);
      float* to = s.scores + p * kPanelKeys + i * kLanes;
      RL_UNROLL for (int r = 0; r < R; ++r)
          store_f(to + r * kTileKeys, mul_f(to_f(acc[r][i]), mul_f(set_f(factors[r]), scale)));
    }
  }

  // Soft-caps a row's scores and masks the keys outside low .. high (of the tile). Returns a vector
  // whose largest number is the largest score left.
  Vf mask_row(float* scores, int low, int high) {
    if (a.softcap > 0) {
      const Vf cap = set_f(a.softcap * kLog2E), inverse = set_f(1.0f / a.softcap);
      for (int j = 0; j < kTileKeys; j += kLanes)
        store_f(scores + j, mul_f(cap, tanh_f(mul_f(load_f(scores + j), inverse))));
    }
    if (low > 0 || high < kTileKeys - 1) {
      for (int j = 0; j < low; ++j) scores[j] = -INFINITY;
      for (int j = high + 1; j < kTileKeys; ++j) scores[j] = -INFINITY;
    }
    Vf top = load_f(scores);
    RL_UNROLL for (int j = kLanes; j < kTileKeys; j += kLanes) top = max_f(top, load_f(scores + j));
    return top;
  }

  // Turns the scores of a row into weights relative to its new maximum `top`; the lanes of `sum`
  // add up to their sum. int8 and fp8: each weight is then multiplied by the scale of its value, and
  // (int8) the largest product is the largest of `max`.
  void softmax_row(float* scores, float top, Vf& sum, Vf& max) const {
    const Vf zero = set_f(top);
    sum = max = set_f(0.0f);
    if constexpr (F::kRoundsToBf16) {
      const auto weight = [&](int j) { return F::exp2(sub_f(load_f(scores + j), zero)); };
      RL_UNROLL for (int j = 0; j < kTileKeys; j += 2 * kLanes) sum =
          F::store_weights(weight(j), weight(j + kLanes), sum, scores + j / 2);
      return;
    }
    RL_UNROLL for (int j = 0; j < kTileKeys; j += kLanes) {
      Vf w = exp2_nonpositive(sub_f(load_f(scores + j), zero));
      sum = add_f(sum, w);
      if constexpr (F::kHasCodes) {
        w = mul_f(w, F::kUsesTiles ? load_f(s.value_scales + j)
                                   : load_scales(s.codes.at->value_scales[j / kLanes]));
        if constexpr (F::kIsFp8)
          w = mul_f(w, set_f(kFp8Weight));
        else
          max = max_f(max, w);
      }
      store_f(scores + j, w);
    }
  }

  // The online softmax of R rows: scores become weights, `rescale` is the factor of earlier sums,
  // and (int8) `max_weight` the largest weights. Rows take each step side by side: alone, most
  // steps would wait for their own latency.
  template <int R>
  RL_NOINLINE void softmax_rows(int row, float* scores, const KeyRange& range,
                                const PartialSoftmax& p, float* rescale, float* max_weight) {
    static_assert(R <= kLanes, "one vector of maxima");
    alignas(64) float before[kLanes] = {}, top[kLanes] = {};
    Vf sums[R], maxima[R];
    for (int r = 0; r < R; ++r) {
      const int low = first_key(row + r) - range.first_key;
      const int high = last_key(row + r) - range.first_key;
      sums[r] = mask_row(scores + r * kTileKeys, low < kTileKeys ? low : kTileKeys,
                         high > -1 ? high : -1);
    }
    float *max = p.max + base() + row, *sum = p.sum + base() + row;
    RL_UNROLL for (int r = 0; r < R; ++r) {
      const float here = reduce_max(sums[r]);
      before[r] = max[r];
      max[r] = top[r] = here > before[r] ? here : before[r];
    }
    store_f(rescale, exp2_nonpositive(sub_f(load_f(before), load_f(top))));
    for (int r = 0; r < R; ++r) {
      softmax_row(scores + r * kTileKeys, top[r], sums[r], maxima[r]);
      if constexpr (F::kUsesTiles) F::prefetch_during_row(*this);
    }
    RL_UNROLL for (int r = 0; r < R; ++r) {
      sum[r] = sum[r] * rescale[r] + reduce_add(sums[r]);
      if constexpr (F::kIsInt8) max_weight[r] = reduce_max(maxima[r]);
    }
  }

  // Whether the values of a tile are packed once, rather than loaded again for every part of the
  // rows.
  bool packs_values() const { return s.num_parts > 2; }

  // The two vectors of values from `slot` on of a key's row.
  static void load_values(const char* row, int slot, int head_dim, Vf (&v)[2]) {
    const int left = (head_dim - slot) * F::kBytes;
    if (__builtin_expect(left >= kPanelKeys * F::kBytes, 1))
      F::load(row, v);
    else
      F::load(PaddedCopy<kPanelKeys * F::kBytes>(row, left).bytes, v);
  }

  // Prefetches the lines of the next rows that correspond to those being read.
  void prefetch_values(int j, int64_t at) const {
    RL_UNROLL for (int i = 0; i < kPanelKeys * F::kBytes; i += kLineBytes) {
      prefetch_to_l2(s.next_rows[j] + at + i);
      prefetch_to_l1(s.rows[j + kNearKeys] + at + i);
    }
  }

  void widen_values(int num_keys) {
    const int slots = F::num_slots(a.head_dim);
    float* to = s.wide_values;
    for (int j = 0; j < num_keys; ++j)
      for (int slot = 0; slot < slots; slot += kPanelKeys, to += kPanelKeys) {
        const int64_t at = slot * F::kBytes + to_values();
        Vf v[2];
        load_values(s.rows[j] + at, slot, a.head_dim, v);
        store_f(to, v[0]);
        store_f(to + kLanes, v[1]);
        prefetch_values(j, at);
      }
  }

  // values[row] = values[row] * rescale + sum over keys low .. high, ascending, of weight * value.
  template <int R, bool kPacked>
  void add_float_values(int row, float* const* values, const float* rescale, int low, int high) {
    const int slots = F::num_slots(a.head_dim);
    const bool prefetches = !kPacked && row == 0;  // once per tile is enough
    for (int slot = 0; slot < slots; slot += kPanelKeys) {
      const int64_t at = slot * F::kBytes + to_values();
      Vf acc[R][2];
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i) acc[r][i] =
          mul_f(load_f(values[r] + slot + i * kLanes), set_f(rescale[r]));
      const float *wide = s.wide_values + low * slots + slot, *weight = s.scores + low;
      for (int j = low; j <= high; ++j, ++weight, wide += slots) {
        Vf v[2];
        if constexpr (kPacked) {
          v[0] = load_f(wide);
          v[1] = load_f(wide + kLanes);
        } else {
          load_values(s.rows[j] + at, slot, a.head_dim, v);
        }
        RL_UNROLL for (int r = 0; r < R; ++r) {
          const Vf w = set_f(weight[r * kTileKeys]);
          acc[r][0] = mul_add_f(w, v[0], acc[r][0]);
          acc[r][1] = mul_add_f(w, v[1], acc[r][1]);
        }
        if (prefetches) prefetch_values(j, at);
      }
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i)
          store_f(values[r] + slot + i * kLanes, acc[r][i]);
    }
  }

  // A row's weights as integers of 16 bits, the largest of them kMaxWord. The lanes of the result
  // add up to their sum.
  Vi quantise_weights(int r, float max_weight) {
    const float* w = s.scores + r * kTileKeys;
    const Vf inverse = set_f(max_weight > 1e-30f ? kMaxWord / max_weight : 0.0f);
    Vi total = set_i(0);
    RL_UNROLL for (int j = 0; j < kTileKeys; j += 2 * kLanes) {
      const Vi x = to_i(mul_f(load_f(w + j), inverse));
      const Vi y = to_i(mul_f(load_f(w + j + kLanes), inverse));
      store_i16(s.weights + (r * kTileKeys + j) / 2, x, y);
      total = add_i(total, add_i(x, y));
    }
    return total;
  }

  template <int R>
  RL_NOINLINE void add_int8_values(float* const* values, const float* rescale,
                                   const float* max_weight, int low, int high) {
    Vi total[R];
    for (int r = 0; r < R; ++r) total[r] = quantise_weights(r, max_weight[r]);
    int32_t sum[R];
    RL_UNROLL for (int r = 0; r < R; ++r) sum[r] = reduce_add(total[r]);
    constexpr int kStep = kVectorsAtOnce<R> * kLanes;
    const int slots = F::num_slots(a.head_dim);
    int slot = 0;
    for (; slot + kStep <= slots; slot += kStep)
      add_value_vectors<R, kStep / kLanes>(slot, sum, values, rescale, max_weight, low, high);
    if constexpr (kStep > kPanelKeys)
      for (; slot < slots; slot += kPanelKeys)
        add_value_vectors<R, 2>(slot, sum, values, rescale, max_weight, low, high);
  }

  // V vectors of slots, from `slot` on; `sum`: of each row's weights.
  template <int R, int V>
  void add_value_vectors(int slot, const int32_t (&sum)[R], float* const* values,
                         const float* rescale, const float* max_weight, int low, int high) {
    const int slots = F::num_slots(a.head_dim);
    Vi acc[R][V];
    RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < V; ++i) acc[r][i] =
        set_i(-128 * sum[r]);
    const int32_t* w = s.weights + 2 * (low / 4);
    for (int quad = low / 4; quad <= high / 4; ++quad, w += 2) {
      const char* v[V];
      if constexpr (F::kIsWidened) {
        const char* wide =
            reinterpret_cast<const char*>(s.wide_value_quads + 2 * (quad * slots + slot));
        RL_UNROLL for (int i = 0; i < V; ++i) v[i] = wide + 8 * kLanes * i;
        multiply_codes<R, V>(acc, v, w, kTileKeys / 2, 1);
      } else {
        RL_UNROLL for (int i = 0; i < V; ++i) v[i] =
            s.codes.at->quads[quad] + s.codes.shift + 4 * (slot + kLanes * i);
        multiply_codes<R, V>(acc, v, w, kTileKeys / 2, 1);
        const int which = 4 * quad / kPrefetchKeys;
        const int at = kPrefetchKeys * slot + V * kLanes * 4 * (quad % 4);
        RL_UNROLL for (int i = 0; i < 4 * V * kLanes; i += kLineBytes) {
          prefetch_to_l1(s.near_prefetch.at->values[which] + s.near_prefetch.shift + at + i);
          prefetch_to_l2(s.far_prefetch.at->values[which] + s.far_prefetch.shift + at + i);
        }
      }
    }
    RL_UNROLL for (int r = 0; r < R; ++r) {
      // A division per row here: the compiler must assume that stores change max_weight.
      const Vf kept = set_f(rescale[r]), by = set_f(max_weight[r] / kMaxWord);
      RL_UNROLL for (int i = 0; i < V; ++i) {
        float* at = values[r] + slot + i * kLanes;
        store_f(at, mul_add_f(load_f(at), kept, mul_f(to_f(acc[r][i]), by)));
      }
    }
  }

  // R rows from `row` on against the tile: scores, softmax, weighted values.
  template <int R>
  void attend_rows(int row, const KeyRange& range, const PartialSoftmax& p) {
    const int last = last_key(row + R - 1) - range.first_key;
    const int first = first_key(row) - range.first_key;
    const int low = first > 0 ? first : 0;
    const int high = last < range.num_keys ? last : range.num_keys - 1;
    if (low > high) return;
    const int first_panel = low / kPanelKeys, end_panel = high / kPanelKeys + 1;
    if constexpr (F::kIsInt8)
      score_int8<R>(row, first_panel, end_panel);
    else if constexpr (F::kIsFp8)
      F::template score<R>(*this, row, first_panel, end_panel);
    else if constexpr (F::kRoundsToBf16)
      F::template score<R>(*this, row, first_panel, end_panel);
    else
      score_floats<R>(row, first_panel, end_panel);
    alignas(64) float rescale[kLanes], max_weight[R];
    float* values[R];
    for (int r = 0; r < R; ++r) values[r] = p.row(base() + row + r);
    softmax_rows<R>(row, s.scores, range, p, rescale, max_weight);
    if constexpr (F::kIsInt8)
      add_int8_values<R>(values, rescale, max_weight, low, high);
    else if constexpr (F::kIsFp8)
      F::template add<R>(*this, values, rescale, low, high);
    else if constexpr (F::kRoundsToBf16)
      packs_values() ? F::template add<R, true>(*this, row, values, rescale, low, high)
                     : F::template add<R, false>(*this, row, values, rescale, low, high);
    else if (packs_values())
      add_float_values<R, true>(row, values, rescale, low, high);
    else
      add_float_values<R, false>(row, values, rescale, low, high);
  }

  // The online softmax of num_rows rows, R at a time.
  template <int R>
  void softmax_all(int row, int num_rows, float* scores, const KeyRange& range,
                   const PartialSoftmax& p, float* rescale, float* max_weight) {
    for (; num_rows >= R;
         num_rows -= R, row += R, scores += R * kTileKeys, rescale += R, max_weight += R)
      softmax_rows<R>(row, scores, range, p, rescale, max_weight);
    if constexpr (R > 1) softmax_all<R / 2>(row, num_rows, scores, range, p, rescale, max_weight);
  }

  template <int R>
  void attend_part(int row, int num_rows, const KeyRange& range, const PartialSoftmax& p) {
    if (num_rows == R) return attend_rows<R>(row, range, p);
    if constexpr (R > 1) attend_part<R - 1>(row, num_rows, range, p);
  }

  int keys_in_tile(int key, int end) const { return end - key < kTileKeys ? end - key : kTileKeys; }

  // The tile that the item begins with.
  void locate_first_tile(KeyTile& to) const {
    const int first = first_key_of(a, item, 0) / kTileKeys * kTileKeys;
    const int end = position_of(a, item, item.num_rows - 1) + 1;
    locate_tile(first, keys_in_tile(first, end), to);
  }

  // One chunk of keys for the item's rows, into cleared partials. Queries must be packed.
  void attend_chunk(int chunk, const PartialSoftmax& p) {
    const int end_of_item = last_key(item.num_rows - 1) + 1;
    const int start_of_item = first_key(0) / kTileKeys * kTileKeys;
    const int begin = chunk * kChunkKeys > start_of_item ? chunk * kChunkKeys : start_of_item;
    const int end = (chunk + 1) * kChunkKeys < end_of_item ? (chunk + 1) * kChunkKeys : end_of_item;
    if (begin >= end) return;
    locate_tile(begin, keys_in_tile(begin, end), s.tiles[0]);
    for (int key = begin, side = 0; key < end; key += kTileKeys, side ^= 1) {
      KeyTile &here = s.tiles[side], &next_tile = s.tiles[side ^ 1];
      const int next = key + kTileKeys;
      if (next < end_of_item)
        locate_tile(next, keys_in_tile(next, end_of_item), next_tile);
      else if (s.next_item)
        Kernel{a, s, *s.next_item}.locate_first_tile(next_tile);
      else
        next_tile.num_keys = next_tile.num_spans = 0;
      for (head = 0; head < item.num_kv; ++head) {
        plan_prefetch(here, next_tile);
        attend_tile({key, keys_in_tile(key, end)}, here, p);
      }
    }
    if constexpr (F::kUsesTiles) F::finish(*this);
  }

  // A tile of the head's keys; meanwhile what comes next is prefetched.
  void attend_tile(const KeyRange& range, const KeyTile& tile, const PartialSoftmax& p) {
    if constexpr (F::kUsesTiles) {
      F::attend_tile(*this, tile, range, p);
    } else {
      pack_tile(tile, range);
      for (int part = 0; part < s.num_parts; ++part) {
        attend_part<F::kPartRows>(s.part[part], s.part[part + 1] - s.part[part], range, p);
        prefetch_queries();
      }
    }
  }

  // `max` is the largest score, in units of 2^x as all scores are.
  void write_row(int r, const float* values, float max, float sum) const {
    const int flat = item.first_row + r % item.num_rows, kv_head = item.kv_head + r / item.num_rows;
    const int64_t row = a.row_start[item.run] + flat / group();
    float* out = a.out + (row * a.num_heads + kv_head * group() + flat % group()) * a.head_dim;
    if (a.sinks)
      sum += exp2f(a.sinks[kv_head * group() + flat % group()] * kLog2E - max);
    const float inverse = (F::kIsFp8 ? kFp8Result : 1.0f) / sum;
    int slot = 0;
    for (; slot + kPanelKeys <= a.head_dim; slot += kPanelKeys)
      F::store_scaled_slots(values + slot, inverse, out + slot);
    for (; slot < F::num_slots(a.head_dim); ++slot)
      if (F::dim_of(slot) < a.head_dim) out[F::dim_of(slot)] = values[slot] * inverse;
  }
};

}  // namespace
}  // namespace ridgeline
