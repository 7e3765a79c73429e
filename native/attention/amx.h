// Attention by AMX tiles: keys and values in bfloat16, or in int8 (at the end), whose integer sums
// are those of the vector kernels.
//
// With a bfloat16 cache, queries and weights are rounded to it, as in bf16_dot.h. A row of a tile
// of sums is added up in the order of Intel's manual, independent of the other rows, so a row's result
// is the same in any batch; with floats it differs from the other variants' in the last bits.
//
//   queries  [32 dimensions][row][32]: row tiles
//   weights  [row][64 keys], where the row's scores were
//   keys     [16 pairs of dimensions][16 keys][2]: 16 x 16 words of the cache's rows, transposed
//   values   [16 pairs of keys][16 dimensions][2]: two rows side by side, dimensions ordered as
//   dim_of
#pragma once
#include <stdint.h>

#include "attention/attention.h"
#include "attention/bf16_dot.h"
#include "attention/formats.h"
#include "attention/kernel.h"
#include "attention/key_tile.h"
#include "attention/scratch.h"
#include "simd/amx.h"
#include "simd/avx512.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

constexpr int kStepNumbers = kTileBytes / 2;  // bfloat16 in a row of a tile
constexpr int kTileWords = kTileRows * kLanes;
constexpr int kTileColumns =
    kTileKeys / kLanes;  // tiles of sums added up together: 64 keys or dimensions

// How many lines of what comes next to prefetch with each step of the work on a head's tile.
struct PrefetchRates {
  int keys, values, products, weights, row;
};

// The part of the rows that tiles multiply, and (bfloat16) products of weights and values whose
// sums are still in tile registers.
struct PendingProducts {
  int64_t step_bytes;  // of a tile of an item's queries and (int8) weights
  int high;            // the last key of the tile that any row of the part sees
  alignas(64) float rescale[kTileRows + kLanes], max_weight[kTileRows];
  float* values;  // what the sums will be added to, rows `stride` apart
  int64_t stride;
  int num_rows, columns;  // num_rows = 0: nothing is pending
  PrefetchRates rates;
};

// What an AMX variant adds to a thread's Scratch.
struct AmxState {
  static constexpr int kMaxPartRows = kTileRows;
  alignas(64) char weight_bytes[2 * kTileRows * kTileBytes];  // int8: lower ones, then upper ones
  alignas(64) float sums[kTileRows * kTileKeys];
  alignas(
      64) int32_t int_sums[2][kTileRows * kTileKeys / 2];  // int8: of lower bytes, of upper ones
  PendingProducts pending;
};

// Packs 16 keys' words from byte `at` of their rows on, 16 of each, to [word][key].
inline void pack_key_words(const char* const* rows, int at, int32_t* to) {
  RL_UNROLL for (int c = 0; c < kTileBytes; c += 16, to += 4 * kLanes) {
    __m512i w[4];
    RL_UNROLL for (int i = 0; i < 4; ++i) {
      const auto words = [&](int lane) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[4 * lane + i] + at + c));
      };
      w[i] = _mm512_castsi128_si512(words(0));
      w[i] = _mm512_inserti32x4(w[i], words(1), 1);
      w[i] = _mm512_inserti32x4(w[i], words(2), 2);
      w[i] = _mm512_inserti32x4(w[i], words(3), 3);
    }
    const __m512i low0 = _mm512_unpacklo_epi32(w[0], w[1]);
    const __m512i low1 = _mm512_unpacklo_epi32(w[2], w[3]);
    const __m512i high0 = _mm512_unpackhi_epi32(w[0], w[1]);
    const __m512i high1 = _mm512_unpackhi_epi32(w[2], w[3]);
    store_i(to, _mm512_unpacklo_epi64(low0, low1));
    store_i(to + kLanes, _mm512_unpackhi_epi64(low0, low1));
    store_i(to + 2 * kLanes, _mm512_unpacklo_epi64(high0, high1));
    store_i(to + 3 * kLanes, _mm512_unpackhi_epi64(high0, high1));
  }
}

// Packs two rows' 32 numbers side by side, to two tiles.
inline void pack_value_pair(const char* first, const char* second, int32_t* to) {
  Vi both[2];
  interleave_rows(first, second, both);
  store_i(to, both[0]);
  store_i(to + kTileWords, both[1]);
}

// One step's products: a row tile with kColumns column tiles, each onto its own sums.
template <int kColumns, int kRows, int kColumn = 0>
inline void multiply_columns(const int32_t* columns, int64_t to_column) {
  if constexpr (kColumn < kColumns) {
    constexpr int kRegister = kWeightTile + kColumn % 2;
    load_tile<kRegister>(columns, kTileBytes);
    dot_tile_bf16<kColumn, kRows, kRegister>();
    multiply_columns<kColumns, kRows, kColumn + 1>(columns + to_column, to_column);
  }
}
template <int kColumns>
inline void store_column_sums(float* to) {
  if constexpr (kColumns > 0) {
    store_column_sums<kColumns - 1>(to);
    store_tile<kColumns - 1>(to + (kColumns - 1) * kLanes, kTileKeys * sizeof(float));
  }
}

// A sum of products, in this order: `steps` row tiles, whose rows are `row_bytes` apart, times
// column tiles; to_column and to_step in words.
struct TileProducts {
  const char* rows;
  int64_t row_bytes, to_rows;  // to the next step's
  const int32_t* columns;
  int64_t to_column, to_step;
  int steps;
  int prefetch_lines;  // with each step
};

template <int kColumns, int kRows>
inline void multiply_step(const TileProducts& p, int step, PrefetchQueue& prefetch) {
  load_tile<kRows>(p.rows + step * p.to_rows, p.row_bytes);
  multiply_columns<kColumns, kRows>(p.columns + step * p.to_step, p.to_column);
  prefetch.issue(p.prefetch_lines);
}
template <int kColumns>
void multiply_steps(const TileProducts& p, PrefetchQueue& prefetch) {
  clear_tiles<kColumns>();
  int step = 0;
  for (; step + 2 <= p.steps; step += 2) {
    multiply_step<kColumns, kRowTile>(p, step, prefetch);
    multiply_step<kColumns, kRowTile + 1>(p, step + 1, prefetch);
  }
  if (step < p.steps) multiply_step<kColumns, kRowTile>(p, step, prefetch);
}

// Products are begun, other work is done while the tiles multiply, and then their sums are stored,
// rows kTileKeys floats apart.
static_assert(kTileColumns == kRowTile, "there must be a register of sums for every column");
inline void begin_products(const TileProducts& p, int num_columns, PrefetchQueue& prefetch) {
  switch (num_columns) {
    case 1: return multiply_steps<1>(p, prefetch);
    case 2: return multiply_steps<2>(p, prefetch);
    case 3: return multiply_steps<3>(p, prefetch);
    default: return multiply_steps<4>(p, prefetch);
  }
}
inline void end_products(int num_columns, float* sums) {
  switch (num_columns) {
    case 1: return store_column_sums<1>(sums);
    case 2: return store_column_sums<2>(sums);
    case 3: return store_column_sums<3>(sums);
    default: return store_column_sums<4>(sums);
  }
}

// Lines per call that make `thirty_seconds` / 32 lines in `calls` calls.
inline int lines_per_call(int thirty_seconds, int calls) {
  return (thirty_seconds + 32 * calls - 1) / (32 * calls);
}

// What both formats share. K: a Kernel of the format.
template <class Format>
struct TileFormat : Format {
  static constexpr bool kUsesTiles = true;
  static constexpr int kPartRows = kTileRows;

  struct TileScope : ScopedTileConfig {
    explicit TileScope(int num_rows) : ScopedTileConfig(tile_height(num_rows), kTileBytes) {}
  };

  // The first part from `part` on of which any row sees a key of the tile; notes the last key that
  // one sees.
  template <class K>
  static int next_visible_part(K& k, int part, const KeyRange& range) {
    for (; part < k.s.num_parts; ++part) {
      const int last = k.last_key(k.s.part[part + 1] - 1) - range.first_key;
      const int high = last < range.num_keys ? last : range.num_keys - 1;
      k.s.pending.high = high;
      if (high >= 0 && k.first_key(k.s.part[part]) <= range.first_key + high) break;
    }
    return part;
  }

  template <class K>
  static void prefetch_during_row(K& k) {
    k.s.prefetch.issue(k.s.pending.rates.row);
  }

  template <class K>
  static void softmax_part(K& k, int part, const KeyRange& range, const PartialSoftmax& p) {
    const int row = k.s.part[part];
    k.template softmax_all<kFloatRows>(row, k.s.part[part + 1] - row, k.s.scores, range, p,
                                       k.s.pending.rescale, k.s.pending.max_weight);
  }
};

// bfloat16, for head dims that are whole tiles.
struct Bf16Tiles : TileFormat<RoundedBf16> {
  // All of what comes next is prefetched while a tile is computed, most of it while nothing else is
  // loaded except from L1: packing reads from L2, where all that is prefetched waits in the same
  // few places. (Spread evenly over steps, three quarters were prefetched while values are packed,
  // which is a third of the time.)
  static PrefetchRates prefetch_rates(int D, int num_lines, int num_rows) {
    const int steps = D / kStepNumbers, batches = (2 * steps + kTileColumns - 1) / kTileColumns;
    const int products = steps + batches * kTileKeys / kStepNumbers;
    return {lines_per_call(6 * num_lines, kTileKeys / kLanes * steps),
            lines_per_call(8 * num_lines, kTileKeys / 2), lines_per_call(8 * num_lines, products),
            lines_per_call(5 * num_lines, 2), lines_per_call(5 * num_lines, num_rows)};
  }
  static bool fits(int D) { return D % kStepNumbers == 0; }

  // The queries of a part; a tile's values.
  template <class K>
  static char* packed_queries(K& k, int part) {
    const int tiles = (k.head * k.s.num_parts + part) * (k.a.head_dim / kStepNumbers);
    return reinterpret_cast<char*>(k.s.queries) + tiles * k.s.pending.step_bytes;
  }
  template <class K>
  static int32_t* packed_values(K& k) {
    return reinterpret_cast<int32_t*>(k.s.wide_values);
  }

  template <class K>
  static void pack_queries(K& k, int part, float unit) {
    const int64_t bytes = int64_t{tile_height(k.item.num_rows)} * kTileBytes;
    k.s.pending.step_bytes = bytes;
    k.s.pending.num_rows = 0;
    k.s.pending.rates = prefetch_rates(k.a.head_dim, k.tile_lines(), k.s.part[1]);
    char* to = packed_queries(k, part);
    for (int row = k.s.part[part]; row < k.s.part[part + 1]; ++row, to += kTileBytes) {
      const float* q = k.query(row);
      for (int d = 0; d < k.a.head_dim; d += kStepNumbers)
        round_queries(q + d, unit, to + d / kStepNumbers * bytes);
    }
  }

  template <class K>
  static void pack_keys(K& k, const KeyRange& range) {
    const char** rows = k.s.rows;
    const int bytes = k.a.head_dim * kBytes;
    hide_unseen(k, range);
    int32_t* to = k.s.key_panels;
    for (int j = 0; j < range.num_keys; j += kLanes)
      for (int at = 0; at < bytes; at += kTileBytes, to += kTileWords) {
        for (int i = j; i < j + kLanes; ++i) prefetch_to_l1(rows[i + kNearKeys] + at);
        k.s.prefetch.issue(k.s.pending.rates.keys);
        pack_key_words(rows + j, at, to);
      }
  }
  template <class K>
  static void pack_values(K& k, const KeyRange& range) {
    const char** rows = k.s.rows;
    const int bytes = k.a.head_dim * kBytes, num_tiles = k.a.head_dim / kLanes;
    for (int j = 0; j < round_up_to(range.num_keys, kStepNumbers); j += 2) {
      int32_t* to = packed_values(k) + j / kStepNumbers * num_tiles * kTileWords +
                    j % kStepNumbers / 2 * kLanes;
      for (int64_t at = k.to_values(); at < k.to_values() + bytes;
           at += kTileBytes, to += 2 * kTileWords) {
        pack_value_pair(rows[j] + at, rows[j + 1] + at, to);
        prefetch_to_l1(rows[j + kNearKeys] + at);
        prefetch_to_l1(rows[j + 1 + kNearKeys] + at);
      }
      k.s.prefetch.issue(k.s.pending.rates.values);
    }
  }

  // Scores, as far as any row of the part sees.
  template <class K>
  static void begin_scores(K& k, int part) {
    const int steps = k.a.head_dim / kStepNumbers;
    begin_products({packed_queries(k, part), kTileBytes, k.s.pending.step_bytes, k.s.key_panels,
                    int64_t{steps} * kTileWords, kTileWords, steps, k.s.pending.rates.products},
                   k.s.pending.high / kLanes + 1, k.s.prefetch);
  }
  template <class K>
  static void end_scores(K& k) {
    end_products(k.s.pending.high / kLanes + 1, k.s.scores);
  }

  // Weighted values. The products of the last 64 dimensions stay pending, until their sums leave
  // the registers (store_pending) and are added to the rescaled values (add_pending).
  template <class K>
  static void begin_values(K& k, int part, const PartialSoftmax& p) {
    const int row = k.s.part[part], num_tiles = k.a.head_dim / kLanes;
    PendingProducts& pending = k.s.pending;
    const int key_steps = pending.high / kStepNumbers + 1;
    for (int tile = 0; tile < num_tiles; tile += kTileColumns) {
      if (tile) finish(k);
      pending.num_rows = k.s.part[part + 1] - row;
      pending.columns = num_tiles - tile < kTileColumns ? num_tiles - tile : kTileColumns;
      pending.values = p.row(k.base() + row) + tile * kLanes;
      pending.stride = p.num_slots;
      begin_products({reinterpret_cast<const char*>(k.s.scores), kTileKeys * sizeof(float),
                      kTileBytes, packed_values(k) + tile * kTileWords, kTileWords,
                      int64_t{num_tiles} * kTileWords, key_steps, pending.rates.products},
                     pending.columns, k.s.prefetch);
    }
  }
  template <class K>
  static void store_pending(K& k) {
    if (k.s.pending.num_rows) end_products(k.s.pending.columns, k.s.sums);
  }
  template <class K>
  static void add_pending(K& k) {
    PendingProducts& pending = k.s.pending;
    const int end = pending.columns * kLanes;
    for (int r = 0; r < pending.num_rows; ++r) {
      float* to = pending.values + r * pending.stride;
      const float* sums = k.s.sums + r * kTileKeys;
      const Vf rescale = set_f(pending.rescale[r]);
      for (int i = 0; i < end; i += kLanes)
        store_f(to + i, fma_f(load_f(to + i), rescale, load_f(sums + i)));
    }
    pending.num_rows = 0;
  }

  // A tile of the head's keys. The first part's scores are multiplied while values are packed and,
  // if there is no other part, its values while the next tile's keys are packed: meanwhile what
  // comes after these is prefetched, since memory would idle otherwise. With many parts memory
  // idles anyway, and leaving products pending was slower.
  template <class K>
  static void attend_tile(K& k, const KeyTile& tile, const KeyRange& range,
                          const PartialSoftmax& p) {
    k.locate_rows(tile, k.head, k.s.rows);
    keep_store_unit_awake<kWeightTile>(k.s.sums);
    pack_keys(k, range);
    int part = TileFormat::next_visible_part(k, 0, range);
    if (part == k.s.num_parts) return;
    store_pending(k);
    begin_scores(k, part);
    add_pending(k);
    pack_values(k, range);
    end_scores(k);
    for (;;) {
      k.s.prefetch.issue(k.s.pending.rates.weights);
      TileFormat::softmax_part(k, part, range, p);
      k.s.prefetch.issue(k.s.pending.rates.weights);
      begin_values(k, part, p);
      if (k.s.num_parts > 1) finish(k);
      k.prefetch_queries();
      part = TileFormat::next_visible_part(k, part + 1, range);
      if (part == k.s.num_parts) return;
      begin_scores(k, part);
      end_scores(k);
    }
  }

  template <class K>
  static void finish(K& k) {
    store_pending(k);
    add_pending(k);
  }
};

// int8 with many rows: the same integers as vectors add up, so the same bits. Queries and weights
// of 16 bits are two bytes each, the upper ones of queries signed, whose sums are combined. Codes
// of keys are tiles as they are in the cache.
struct Int8Tiles : TileFormat<Int8<true>> {
  static constexpr int kPairs =
      2;  // tiles of 16 keys or dimensions at a time: two tiles of sums each
  static bool fits(int D, int block_size) {
    return D % kTileBytes == 0 && block_size % kLanes == 0;
  }
  // What comes next is prefetched all the time, most of it while products are pending; prefetched
  // while values are packed, it would wait behind them, and memory would idle during the softmax.
  static PrefetchRates prefetch_rates(int D, int num_lines, int num_rows) {
    constexpr int kStep = kPairs * kLanes;
    const int products = kTileKeys / kStep * (D / kTileBytes) + D / kStep;
    return {0, lines_per_call(4 * num_lines, kTileKeys / 4),
            lines_per_call(20 * num_lines, products), 0, lines_per_call(8 * num_lines, num_rows)};
  }

  template <class K>
  static char* packed_queries(K& k, int part) {
    const int tiles = (k.head * k.s.num_parts + part) * (k.a.head_dim / kTileBytes) * 2;
    return reinterpret_cast<char*>(k.s.queries) + tiles * k.s.pending.step_bytes;
  }

  // Stores the lower bytes of 64 integers, and `to_high` bytes behind them the next ones.
  static void store_bytes(const int32_t* x, char* to, int64_t to_high) {
    for (int i = 0; i < kTileBytes; i += kLanes) {
      const Vi v = load_i(x + i);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(v));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i + to_high),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(v, 8)));
    }
  }

  template <class K>
  static void pack_queries(K& k, int part, float unit) {
    const int64_t bytes = int64_t{tile_height(k.item.num_rows)} * kTileBytes;
    k.s.pending.step_bytes = bytes;
    k.s.pending.rates = prefetch_rates(k.a.head_dim, k.tile_lines(), k.s.part[1]);
    char* to = packed_queries(k, part);
    alignas(64) int32_t codes[kMaxHeadDim + kLanes];
    for (int row = k.s.part[part]; row < k.s.part[part + 1]; ++row, to += kTileBytes) {
      k.quantise_query(row, unit, codes);
      for (int d = 0; d < k.a.head_dim; d += kTileBytes)
        store_bytes(codes + d, to + d / kTileBytes * 2 * bytes, bytes);
    }
  }

  // `from`: tiles of lower and of upper bytes, `bytes` apart; two column tiles, rows `stride`
  // apart.
  template <bool kSigned>
  static void multiply(const char* from, int64_t bytes, const char* column0, const char* column1,
                       int64_t stride) {
    load_tile<kRowTile>(from, kTileBytes);
    load_tile<kRowTile + 1>(from + bytes, kTileBytes);
    load_tile<kWeightTile>(column0, stride);
    dot_tile_bytes<0, kRowTile, kWeightTile, true, true>();
    dot_tile_bytes<2, kRowTile + 1, kWeightTile, true, !kSigned>();
    load_tile<kWeightTile + 1>(column1, stride);
    dot_tile_bytes<1, kRowTile, kWeightTile + 1, true, true>();
    dot_tile_bytes<3, kRowTile + 1, kWeightTile + 1, true, !kSigned>();
  }
  template <class K>
  static void store_int_sums(K& k) {
    store_tile<0>(k.s.int_sums[0], kPairs * kTileBytes);
    store_tile<1>(k.s.int_sums[0] + kLanes, kPairs * kTileBytes);
    store_tile<2>(k.s.int_sums[1], kPairs * kTileBytes);
    store_tile<3>(k.s.int_sums[1] + kLanes, kPairs * kTileBytes);
  }
  // A row's sums of lower bytes plus 256 times those of upper ones, which are behind those of all
  // rows.
  static Vi combine(const int32_t* sums, Vi offset) {
    const Vi upper = _mm512_slli_epi32(load_i(sums + kTileRows * kPairs * kLanes), 8);
    return add_i(add_i(upper, load_i(sums)), offset);
  }

  template <class K>
  static void score(K& k, int part) {
    const Int8Places& codes = k.s.copied;
    const int row = k.s.part[part], num_rows = k.s.part[part + 1] - row, D = k.a.head_dim;
    const int64_t bytes = k.s.pending.step_bytes;
    for (int j = 0; j <= k.s.pending.high; j += kPairs * kLanes) {
      clear_tiles<4>();
      const char* from = packed_queries(k, part);
      for (int d = 0; d < D; d += kTileBytes, from += 2 * bytes) {
        const int64_t at = d / 4 * codes.stride;
        multiply<true>(from, bytes, codes.words[j / kLanes] + at, codes.words[j / kLanes + 1] + at,
                       codes.stride);
        k.s.prefetch.issue(k.s.pending.rates.products);
      }
      store_int_sums(k);
      const int32_t *query_sum = k.s.query_sum + k.base() + row, *sums = k.s.int_sums[0];
      const float* factors = k.s.factor + k.base() + row;
      const Vf scales[kPairs] = {load_f(k.s.key_scales + j), load_f(k.s.key_scales + j + kLanes)};
      float* to = k.s.scores + j;
      for (int r = 0; r < num_rows; ++r, to += kTileKeys, sums += kPairs * kLanes) {
        const Vi offset = set_i(-128 * query_sum[r]);
        const Vf factor = set_f(factors[r]);
        RL_UNROLL for (int i = 0; i < kPairs; ++i)
            store_f(to + i * kLanes,
                    mul_f(to_f(combine(sums + i * kLanes, offset)), mul_f(factor, scales[i])));
      }
    }
  }

  // Stores a row's weights, integers of up to 15 bits, as lower bytes and `to_high` behind them
  // upper ones; returns their sum. Four vectors of weights make one of bytes: dword 4 i + j has
  // keys 16 j + 4 i .. + 3, the second and third swapped, as values are stored.
  static int32_t store_weight_bytes(const float* w, float max_weight, char* to, int64_t to_high) {
    const Vi order = _mm512_set4_epi32(0x0F0D0E0C, 0x0B090A08, 0x07050604, 0x03010200);
    const Vi low = _mm512_set1_epi16(255);
    const Vf inverse = set_f(max_weight > 1e-30f ? kMaxWord / max_weight : 0.0f);
    Vi x[4];
    RL_UNROLL for (int i = 0; i < 4; ++i) x[i] = to_i(mul_f(load_f(w + i * kLanes), inverse));
    const Vi first = _mm512_packs_epi32(x[0], x[1]), second = _mm512_packs_epi32(x[2], x[3]);
    const auto store = [order](Vi a, Vi b, char* at) {
      store_i(at, _mm512_shuffle_epi8(_mm512_packus_epi16(a, b), order));
    };
    store(_mm512_and_si512(first, low), _mm512_and_si512(second, low), to);
    store(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8), to + to_high);
    return reduce_add(add_i(add_i(x[0], x[1]), add_i(x[2], x[3])));
  }

  template <class K>
  static void add_values(K& k, int part, const PartialSoftmax& p) {
    const PendingProducts& pending = k.s.pending;
    const int row = k.s.part[part], num_rows = k.s.part[part + 1] - row, D = k.a.head_dim;
    int32_t sum[kTileRows];
    float scale[kTileRows];
    for (int r = 0; r < num_rows; ++r) {
      sum[r] = store_weight_bytes(k.s.scores + r * kTileKeys, pending.max_weight[r],
                                  k.s.weight_bytes + r * kTileBytes, pending.step_bytes);
      scale[r] = pending.max_weight[r] / kMaxWord;
    }
    const char* values = reinterpret_cast<const char*>(k.s.wide_value_quads);
    for (int slot = 0; slot < D;
         slot += kPairs * kLanes, values += kPairs * kTileRows * kTileBytes) {
      clear_tiles<4>();
      multiply<false>(k.s.weight_bytes, pending.step_bytes, values, values + kTileRows * kTileBytes,
                      kTileBytes);
      k.s.prefetch.issue(pending.rates.products);
      store_int_sums(k);
      const int32_t* sums = k.s.int_sums[0];
      float* at = p.row(k.base() + row) + slot;
      for (int r = 0; r < num_rows; ++r, at += p.num_slots, sums += kPairs * kLanes) {
        const Vi offset = set_i(-128 * sum[r]);
        const Vf rescale = set_f(pending.rescale[r]), by = set_f(scale[r]);
        RL_UNROLL for (int i = 0; i < kPairs; ++i) {
          const Vf added = mul_f(to_f(combine(sums + i * kLanes, offset)), by);
          store_f(at + i * kLanes, fma_f(load_f(at + i * kLanes), rescale, added));
        }
      }
    }
  }

  // Packs values to [16 dimensions][four keys of 16, ordered as in
  // store_weight_bytes][dimension][4]: quads may be in different blocks.
  template <class K>
  static void pack_values(K& k, const KeyRange& range) {
    char* const to = reinterpret_cast<char*>(k.s.wide_value_quads);
    for (int quad = 0; 4 * quad < range.num_keys; ++quad) {
      for (int d = 0; d < k.a.head_dim; d += kLanes)
        store_i(to + (d / kLanes * kTileRows + quad % 4 * 4 + quad / 4) * kTileBytes,
                load_i(k.s.copied.quads[quad] + 4 * d));
      k.s.prefetch.issue(k.s.pending.rates.values);
    }
  }

  template <class K>
  static void attend_tile(K& k, const KeyTile& tile, const KeyRange& range,
                          const PartialSoftmax& p) {
    k.load_codes(tile);
    pack_values(k, range);
    for (int part = TileFormat::next_visible_part(k, 0, range); part < k.s.num_parts;
         part = TileFormat::next_visible_part(k, part + 1, range)) {
      score(k, part);
      TileFormat::softmax_part(k, part, range, p);
      add_values(k, part, p);
      k.prefetch_queries();
    }
  }
  template <class K>
  static void finish(K&) {}
};

}  // namespace
}  // namespace ridgeline
