// Multiplies panels of a weight by rows: the loops around an engine (engine.h).
//
// There are two ways through a panel, with the same bits. For few rows (with AVX-512 VNNI for any
// number, up to kRowBlock at a time) each line is read from memory once, decoded in registers and
// used for a tile of rows; the next tile finds the line in L1 and prefetches its share of those
// behind it, and results stay in registers from group to group. That runs at the speed of memory.
// For many rows elsewhere, a chunk of 128 inputs is decoded into L1 once, and tiles of E::kRows
// rows with all their sums in registers pass over it. That runs at the speed of arithmetic. (int4
// on AVX2 without VNNI uses another method for many rows: int4_maddubs.h.)
#pragma once
#include <string.h>

#include "linear/engine.h"
#include "linear/linear.h"
#include "simd/compiler.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr int kChunkBlocks = 4;         // inputs decoded into L1 at once: 128
constexpr int kDirectBlocks = 32;       // inputs that a single tile of few rows takes at once: 1024
constexpr int kSharedBytes = 16 << 10;  // of lines that several tiles take in turn: half of L1
constexpr int kRowBlock = 96;           // rows whose partial results stay in L1, their x in L2

// The scales (or minima) of outputs first .. first + kLanes - 1 of a panel's group.
inline Vf group_scale(const PackedWeight& w, const uint16_t* halves, const int8_t* steps, int panel,
                      int group, int first) {
  const int64_t span = steps ? group / w.groups_per_span() : group;
  const int64_t num = steps ? w.num_spans() : w.num_groups();
  const Vf value = load_f16(halves + (panel * num + span) * kPanel + first);
  if (!steps) return value;
  const int64_t at = (int64_t{panel} * w.num_groups() + group) * kPanel + first;
  return mul_f(value, to_f(load_s8(steps + at)));
}

// Zeros, scales and minima of one group of a panel: looked up once where many tiles use them, since
// the look-up takes divisions. (With few rows, waiting for it takes longer than group_scale does.)
struct GroupParams {
  int32_t zero[kPanel];
  float scale[kPanel], min[kPanel];
};

// Groups first .. first + num - 1 of a panel. Params is a GroupParams.
template <class E, class Params>
void load_group_params(const PackedWeight& w, int panel, int first, int num, Params* to) {
  const int64_t num_groups = w.num_groups(), num_spans = w.num_spans();
  const int64_t per_span = w.groups_per_span();
  for (int g = first; g < first + num; ++g, ++to) {
    const int64_t at = (panel * num_groups + g) * kPanel;
    const int64_t span = (panel * num_spans + (w.steps ? g / per_span : g)) * kPanel;
    __builtin_prefetch(w.scales + span + num_spans * kPanel);  // the next panel's
    for (int i = 0; i < kPanel; i += kLanes) {
      const auto value = [&](const uint16_t* halves, const int8_t* steps) {
        const Vf half = load_f16(halves + span + i);
        return steps ? mul_f(half, to_f(load_s8(steps + at + i))) : half;
      };
      const bool has_zeros = E::kHasZeros && w.zeros, starts_at_0 = E::kHasZeros && w.mins;
      store_i(to->zero + i,
              has_zeros ? load_u8(w.zeros + at + i) : set_i(starts_at_0 ? 0 : E::kMiddle));
      store_f(to->scale + i, value(w.scales, w.steps));
      if (w.mins) store_f(to->min + i, value(w.mins, w.min_steps));
    }
  }
}

// part[row][output] += rows x one block (kFresh: part = rows x one block). `at` points at packed
// lines, one pointer per panel (kDirect), or at the decoded tile in L1. Where rows are read in
// place, every other step goes to `odd`, which may be `part`. kDirect: with each line, the byte
// `ahead` of it is prefetched, `step` bytes further for each line.
template <class E, int P, int kRows, bool kDirect, bool kFresh>
RL_INLINE void multiply_block(const uint8_t* const* at, const uint8_t* x, int64_t ahead,
                              int64_t step, typename E::Part (&part)[kRows][P * kVecs],
                              typename E::Part (&odd)[kRows][P * kVecs]) {
  constexpr int V = P * kVecs, kSteps = steps<E>(), kRowBytes = kSteps * 4;
  constexpr int kPieces = kDirect ? E::kLines : kSteps, kPer = kDirect ? E::kStepsPerLine : 1;
  RL_UNROLL for (int piece = 0; piece < kPieces; ++piece) {
    typename E::Vec w[P][kPer][kVecs];
    if constexpr (kDirect) {
      RL_UNROLL for (int p = 0; p < P; ++p) {
        __builtin_prefetch(at[p] + ahead + piece * step, 0, E::kPrefetchLevel);
        if constexpr (E::kNearPrefetchLines > 0 && kRows >= E::kNearPrefetchMinRows)
          __builtin_prefetch(at[p] + (E::kNearPrefetchLines + piece) * kLineBytes, 0, 3);
        E::decode(at[p] + piece * kLineBytes, w[p]);
      }
    } else {
      RL_UNROLL for (int v = 0; v < V; ++v) w[v / kVecs][0][v % kVecs] =
          E::load(at[0] + (piece * V + v) * kLanes * 4);
    }
    RL_UNROLL for (int s = 0; s < kPer; ++s) RL_UNROLL for (int r = 0; r < kRows; ++r) {
      const uint8_t* four = x + r * kRowBytes + (piece * kPer + s) * 4;
      if constexpr (V == 1 && E::kRowsFromMemory) {
        typename E::Part& sum = (piece * kPer + s) % 2 ? odd[r][0] : part[r][0];
        sum = E::dot_memory(sum, w[0][s][0], four);
        continue;
      }
      const typename E::Vec xv = E::broadcast(four);
      RL_UNROLL for (int v = 0; v < V; ++v) {
        const typename E::Vec one = w[v / kVecs][s][v % kVecs];
        if constexpr (kFresh) {
          if (piece == 0 && s == 0) {
            part[r][v] = E::product(one, xv);
            continue;
          }
        }
        part[r][v] = E::dot(part[r][v], one, xv);
      }
    }
  }
}

// sum[row][output] += rows x num_blocks blocks; leaves `at` and `x` behind them.
template <class E, int P, int kRows, bool kDirect>
RL_INLINE void multiply_blocks(const uint8_t* (&at)[kDirect ? P : 1], const uint8_t*& x,
                               int64_t block_bytes, int num_blocks, int64_t& ahead, int64_t step,
                               typename E::Part (&sum)[kRows][P * kVecs]) {
  constexpr int64_t kStride = kDirect ? E::kLines * kLineBytes : steps<E>() * P * kLineBytes;
  // With few rows of one panel, the products of a row would wait for each other.
  constexpr bool kTwoSums = E::kRowsFromMemory && P * kVecs == 1 && kRows <= 4;
  typename E::Part second[kRows][P * kVecs];
  typename E::Part(*odd)[kRows][P * kVecs] = kTwoSums ? &second : &sum;
  if constexpr (kTwoSums) RL_UNROLL for (int r = 0; r < kRows; ++r) second[r][0] = E::zero();
  for (int b = 0; b < num_blocks; ++b, x += block_bytes) {
    if constexpr (E::kWidensPerBlock) {  // a block's products in 16 bits, then onto sums of 32
      typename E::Part part[kRows][P * kVecs];
      multiply_block<E, P, kRows, kDirect, true>(at, x, ahead, step, part, part);
      RL_UNROLL for (int r = 0; r < kRows; ++r) RL_UNROLL for (int v = 0; v < P * kVecs; ++v)
          sum[r][v] = E::widen(sum[r][v], part[r][v]);
    } else {
      multiply_block<E, P, kRows, kDirect, false>(at, x, ahead, step, sum, *odd);
    }
    RL_UNROLL for (auto& pointer : at) pointer += kStride;
    ahead += E::kLines * (step - kLineBytes);
  }
  if constexpr (kTwoSums)
    RL_UNROLL for (int r = 0; r < kRows; ++r) sum[r][0] = E::add(sum[r][0], second[r][0]);
}

// Decodes lines of P panels into L1: [step][panel][64 bytes].
template <class E, int P>
void decode_chunk(const uint8_t* const* w, int num_blocks, uint8_t* tile) {
  for (int p = 0; p < P; ++p) {
    const uint8_t* line = w[p];
    uint8_t* to = tile + p * kLineBytes;
    for (int i = 0; i < num_blocks * E::kLines; ++i, line += kLineBytes) {
      typename E::Vec decoded[E::kStepsPerLine][kVecs];
      E::decode(line, decoded);
      RL_UNROLL for (int s = 0; s < E::kStepsPerLine; ++s, to += P * kLineBytes)
          RL_UNROLL for (int v = 0; v < kVecs; ++v) E::store(to + v * kLanes * 4, decoded[s][v]);
    }
  }
}

// A chunk of inputs of some panels.
template <class E>
struct Chunk {
  const LinearArgs& a;
  int first_panel;
  int group;                // the first one
  const uint8_t* const* w;  // lines of each panel, or the decoded tile
  const uint8_t* x;         // the chunk's first block, first row of all
  int64_t block_bytes;
  int num_blocks;       // whole groups of them where groups have scales
  int64_t ahead, step;  // see multiply_block
};

// The exact sums of a group start from -zero * sum(x).
template <class E, int P, int kRows>
RL_INLINE void start_group(const Chunk<E>& c, int group, int row, Vi (&sum)[kRows][P * kVecs]) {
  const PackedWeight& w = c.a.weight;
  const int32_t* row_sums = c.a.sums + static_cast<int64_t>(group) * c.a.num_rows + row;
  if (!E::kHasZeros || !w.zeros) {
    const int32_t middle = E::kHasZeros && w.mins ? 0 : E::kMiddle;
    RL_UNROLL for (int r = 0; r < kRows; ++r) RL_UNROLL for (int v = 0; v < P * kVecs; ++v)
        sum[r][v] = set_i(-middle * row_sums[r]);
    return;
  }
  RL_UNROLL for (int p = 0; p < P; ++p) {
    const int64_t at = (static_cast<int64_t>(c.first_panel + p) * w.num_groups() + group) * kPanel;
    RL_UNROLL for (int v = 0; v < kVecs; ++v) {
      const Vi zero = load_u8(w.zeros + at + v * kLanes);
      RL_UNROLL for (int r = 0; r < kRows; ++r) sum[r][p * kVecs + v] =
          mul_i(zero, set_i(-row_sums[r]));
    }
  }
}

// At the end of a group its sums are scaled onto the partial results, then the minima times the sum
// of the row's group.
template <class E, int P, int kRows, class Results>
RL_INLINE void end_group(const Chunk<E>& c, int group, int row, const Vi (&sum)[kRows][P * kVecs],
                         Results& y) {
  const PackedWeight& w = c.a.weight;
  const int64_t from = static_cast<int64_t>(group) * c.a.num_rows + row;
  const float* row_scales = c.a.scales + from;
  RL_UNROLL for (int p = 0; p < P; ++p) RL_UNROLL for (int v = 0; v < kVecs; ++v) {
    const Vf scale = group_scale(w, w.scales, w.steps, c.first_panel + p, group, v * kLanes);
    const int i = p * kVecs + v;
    RL_UNROLL for (int r = 0; r < kRows; ++r)
        y.add(r, i, to_f(sum[r][i]), mul_f(scale, set_f(row_scales[r])));
  }
  if (!w.mins) return;
  RL_UNROLL for (int p = 0; p < P; ++p) RL_UNROLL for (int v = 0; v < kVecs; ++v) {
    const Vf min = group_scale(w, w.mins, w.min_steps, c.first_panel + p, group, v * kLanes);
    RL_UNROLL for (int r = 0; r < kRows; ++r)
        y.add(r, p * kVecs + v, min, set_f(static_cast<float>(c.a.sums[from + r]) * row_scales[r]));
  }
}

template <int kNum>
RL_INLINE void load_all(const float* from, Vf* to) {
  RL_UNROLL for (int i = 0; i < kNum; ++i) to[i] = load_f(from + i * kLanes);
}

template <int kNum>
RL_INLINE void store_all(const Vf* from, float* to) {
  RL_UNROLL for (int i = 0; i < kNum; ++i) store_f(to + i * kLanes, from[i]);
}

// Partial results of a tile: in registers from group to group, or in memory.
template <bool kInRegisters, int kRows, int V>
struct Partials {
  struct Type {
    Vf y[kRows][V];
    RL_INLINE void begin(const float* partial) { load_all<kRows * V>(partial, &y[0][0]); }
    RL_INLINE void end(float* partial) const { store_all<kRows * V>(&y[0][0], partial); }
    RL_INLINE void add(int r, int i, Vf a, Vf b) { y[r][i] = fma_f(a, b, y[r][i]); }
  };
};
template <int kRows, int V>
struct Partials<false, kRows, V> {
  struct Type {
    float* partial;
    RL_INLINE void begin(float* memory) { partial = memory; }
    RL_INLINE void end(float*) const {}
    RL_INLINE void add(int r, int i, Vf a, Vf b) {
      float* at = partial + (r * V + i) * kLanes;
      store_f(at, fma_f(a, b, load_f(at)));
    }
  };
};

// A chunk times kRows rows, onto their partial results [kRows][P * 16]: int32 for int8, else
// floats.
template <class E, int P, int kRows, bool kDirect>
void multiply_chunk_rows(const Chunk<E>& c, int row, float* partial) {
  constexpr int V = P * kVecs, kPointers = kDirect ? P : 1;
  const uint8_t* x = c.x + static_cast<int64_t>(row) * steps<E>() * 4;
  const uint8_t* at[kPointers];
  int64_t ahead = c.ahead;
  for (int p = 0; p < kPointers; ++p) at[p] = c.w[p];
  if constexpr (E::kScaledGroups) {
    const int per_group = c.a.weight.group / E::kBlockInputs;
    const int end = c.group + c.num_blocks / per_group;
    typename Partials<kDirect, kRows, V>::Type y;
    y.begin(partial);
    for (int group = c.group; group < end; ++group) {
      typename E::Part sum[kRows][V];
      start_group<E, P, kRows>(c, group, row, sum);
      multiply_blocks<E, P, kRows, kDirect>(at, x, c.block_bytes, per_group, ahead, c.step, sum);
      end_group<E, P, kRows>(c, group, row, sum, y);
    }
    y.end(partial);
  } else {
    typename E::Elem* acc = reinterpret_cast<typename E::Elem*>(partial);
    typename E::Part sum[kRows][V];
    RL_UNROLL for (int r = 0; r < kRows; ++r) RL_UNROLL for (int v = 0; v < V; ++v) sum[r][v] =
        E::begin(acc + (r * V + v) * kLanes);
    multiply_blocks<E, P, kRows, kDirect>(at, x, c.block_bytes, c.num_blocks, ahead, c.step, sum);
    RL_UNROLL for (int r = 0; r < kRows; ++r) RL_UNROLL for (int v = 0; v < V; ++v)
        E::end(acc + (r * V + v) * kLanes, sum[r][v]);
  }
}

template <class E, int P, int kRows, bool kDirect>
void multiply_tile(const Chunk<E>& c, int row, int num_rows, float* partial) {
  if (num_rows == kRows) return multiply_chunk_rows<E, P, kRows, kDirect>(c, row, partial);
  if constexpr (kRows > 1) multiply_tile<E, P, kRows - 1, kDirect>(c, row, num_rows, partial);
}

// Cuts rows into as few tiles as possible, as evenly as possible: a tile of one row wastes most of
// its loads. Of several tiles, each prefetches its share of the lines behind the chunk, so that
// memory never waits for arithmetic.
template <class E, int P, int kRows, bool kDirect>
void multiply_tiles(Chunk<E>& c, int row, int num_rows, float* partial) {
  const int num = (num_rows + kRows - 1) / kRows, lines = c.num_blocks * E::kLines;
  c.step = (kLineBytes + num - 1) / num;
  for (int t = 0, r = 0; t < num; ++t) {
    const int next = num_rows * (t + 1) / num;
    c.ahead = num == 1 ? (num_rows > 4 ? E::kPrefetchLinesManyRows : E::kPrefetchLines) * kLineBytes
                       : int64_t{lines + lines * t / num} * kLineBytes;
    multiply_tile<E, P, kRows, kDirect>(c, row + r, next - r, partial + r * P * kPanel);
    r = next;
  }
}

// Writes the outputs of one row from its partial results: factors, bias, and only outputs that
// exist.
template <class E, int P>
void write_row(const LinearArgs& a, int first_panel, int row, const float* partial) {
  const PackedWeight& w = a.weight;
  for (int p = 0; p < P; ++p) {
    const int first = (first_panel + p) * kPanel;
    const int count = w.num_out - first < kPanel ? w.num_out - first : kPanel;
    alignas(64) float y[kPanel];
    float* out = a.out + (row - a.first_row) * a.out_stride + first;
    float* to = count == kPanel ? out : y;
    for (int i = 0; i < kPanel; i += kLanes) {
      Vf value = E::finish(a, partial + p * kPanel + i, first + i, row);
      if (w.bias && count == kPanel) value = fma_f(value, set_f(1.0f), load_f(w.bias + first + i));
      if constexpr (E::Variant::kStreamMinRows > 0) {
        if (streams_results<typename E::Variant>(a) && !(reinterpret_cast<uintptr_t>(to) & 63)) {
          stream_f(to + i, value);
          continue;
        }
      }
      store_f(to + i, value);
    }
    if (count == kPanel) continue;
    if (w.bias)
      for (int i = 0; i < count; ++i) y[i] = y[i] + w.bias[first + i];
    memcpy(out, y, sizeof(float) * static_cast<size_t>(count > 0 ? count : 0));
  }
}

// Writes rows first_row .. first_row + num_rows - 1 from their partial results [row][P * 16]: of
// whole panels output by output, so that factors and bias stay in registers.
template <class E, int P>
void write_rows(const LinearArgs& a, int first_panel, int first_row, int num_rows,
                const float* partial) {
  const PackedWeight& w = a.weight;
  const bool row_by_row =
      (first_panel + P) * kPanel > w.num_out || streams_results<typename E::Variant>(a);
  if (row_by_row) {
    for (int r = 0; r < num_rows; ++r)
      write_row<E, P>(a, first_panel, first_row + r, partial + r * P * kPanel);
    return;
  }
  for (int i = 0; i < P * kPanel; i += kLanes) {
    const int at = first_panel * kPanel + i;
    const Vf bias = w.bias ? load_f(w.bias + at) : set_f(0.0f);
    float* out = a.out + (first_row - a.first_row) * a.out_stride + at;
    for (int r = 0; r < num_rows; ++r, out += a.out_stride) {
      const Vf value = E::finish(a, partial + r * P * kPanel + i, at, first_row + r);
      store_f(out, w.bias ? fma_f(value, set_f(1.0f), bias) : value);
    }
  }
}

// Prefetches the next chunk of each panel while this one is multiplied. Behind the last one that is
// harmless.
template <class E, int P>
inline void prefetch_chunk(const uint8_t* const* lines, int num_blocks) {
  for (int p = 0; p < P; ++p) {
    const uint8_t* next = lines[p] + num_blocks * E::kLines * kLineBytes;
    for (int i = 0; i < num_blocks * E::kLines; ++i) __builtin_prefetch(next + i * kLineBytes);
  }
}

// P panels times rows first_row .. first_row + num_rows - 1, at most kRowBlock.
template <class E, int P>
void multiply_panels(const LinearArgs& a, int first_panel, int first_row, int num_rows) {
  using Variant = typename E::Variant;
  alignas(64) float partial[kRowBlock * P * kPanel];
  alignas(64) uint8_t tile[kChunkBlocks * steps<E>() * P * kLineBytes];
  const PackedWeight& w = a.weight;
  const int blocks = w.padded_in() / E::kBlockInputs, per_group = w.group / E::kBlockInputs;
  const int64_t block_bytes = static_cast<int64_t>(a.num_rows) * steps<E>() * 4;
  const uint8_t* lines[P];
  for (int p = 0; p < P; ++p) lines[p] = w.lines + (first_panel + p) * w.panel_bytes();
  for (int r = 0; r < num_rows; ++r)
    E::template clear<P>(a, first_row + r, partial + r * P * kPanel);
  constexpr int kTileRows = E::kNeedsNoDecoding ? Variant::kStoredRows : Variant::kDirectRows;
  constexpr int kDirectMaxRows =
      E::kNeedsNoDecoding ? Variant::kStoredMaxRows : Variant::kDirectMaxRows;
  const bool direct = num_rows <= kDirectMaxRows;
  const int shared = kSharedBytes / P / (E::kLines * kLineBytes);
  const int most = !direct ? kChunkBlocks : num_rows <= kTileRows ? kDirectBlocks : shared;
  const int step = E::kScaledGroups ? most / per_group * per_group : most;
  for (int b = 0; b < blocks; b += step) {
    const int count = blocks - b < step ? blocks - b : step;
    const uint8_t* x = static_cast<const uint8_t*>(a.x) + b * block_bytes;
    Chunk<E> c = {a, first_panel, b / per_group, lines, x, block_bytes, count, 0, 0};
    if (direct) {
      multiply_tiles<E, P, kTileRows, true>(c, first_row, num_rows, partial);
    } else if constexpr (E::kNeedsNoDecoding && P == 1) {
      multiply_tiles<E, P, E::kRows, false>(c, first_row, num_rows, partial);
    } else {
      prefetch_chunk<E, P>(lines, count);
      decode_chunk<E, P>(lines, count, tile);
      const uint8_t* const decoded[1] = {tile};
      c.w = decoded;
      multiply_tiles<E, P, E::kRows, false>(c, first_row, num_rows, partial);
    }
    for (int p = 0; p < P; ++p) lines[p] += count * E::kLines * kLineBytes;
  }
  write_rows<E, P>(a, first_panel, first_row, num_rows, partial);
}

// Panels first_panel .. end_panel - 1 times all rows, with engine E.
template <class E>
void multiply_with(const LinearArgs& a, int first_panel, int end_panel) {
  constexpr bool kIsBytes = steps<E>() == E::kBlockInputs / 4;
  constexpr int kRows = kIsBytes ? kRowBlock : kRowBlock / 2;
  for (int row = a.first_row; row < a.end_row; row += kRows) {
    const int num_rows = a.end_row - row < kRows ? a.end_row - row : kRows;
    int p = first_panel;
    for (; p + E::kPanels <= end_panel; p += E::kPanels)
      multiply_panels<E, E::kPanels>(a, p, row, num_rows);
    if constexpr (E::kPanels > 1)
      for (; p < end_panel; ++p) multiply_panels<E, 1>(a, p, row, num_rows);
  }
}

// The same, in blocks of the size in which the rows are laid out; groups of 16 have engines of
// their own.
template <class E>
void multiply_with_block_size(const LinearArgs& a, int first_panel, int end_panel) {
  constexpr int kMaxBlock = E::Variant::kMaxBlock;
  if constexpr (kMaxBlock > kBlock)
    if (block_of(a.weight.group, kMaxBlock) == kMaxBlock)
      return multiply_with<WithBlocksOf<E, kMaxBlock>>(a, first_panel, end_panel);
  multiply_with<E>(a, first_panel, end_panel);
}

}  // namespace
}  // namespace ridgeline
