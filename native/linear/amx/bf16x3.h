// bfloat16 weights by AMX tiles: 16 rows x 32 inputs times 32 inputs x 16 outputs per instruction.
//
// A weight tile is 16 lines as they are in memory. Rows are floats, but tiles multiply bfloat16
// only: so each number is split into three of them, which is exact, and a row's terms are laid out
// as
//   [tile of up to 16 rows][32 inputs][term][row][32]
// REDUCTION ORDER: 32 inputs after the other; of each the products of the first term, then of the
// second and the third, summed as Intel's manual says (even inputs in one chain, odd ones in
// another, then both added to the sum). It is the same for one row as for many, so a row's result
// is the same in any batch; it differs from the other variants' in the last bits.
#pragma once
#include <string.h>

#include "linear/amx/tiles.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "simd/amx.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

constexpr int kTerms = 3, kTermBytes = kBlock * 2;  // bytes of a row's term in a block
constexpr int kSpanInputs = 2048;                   // inputs by which rows pass at once:
constexpr int kSpanRowTiles = 4;                    // this many row tiles of them stay in L2
constexpr int kUncutRowTiles = 3;                   // ... of any number of inputs

// How rows are cut into tiles.
struct TermTiles {
  int num_rows, height;
  explicit TermTiles(int rows) : num_rows(rows), height(tile_height(rows)) {}
  int first(int tile) const { return tile * height; }
  int64_t byte_offset(int tile, int64_t padded_in) const {
    return first(tile) * padded_in * (2 * kTerms);
  }
  int rows(int tile) const {
    return height < num_rows - tile * height ? height : num_rows - tile * height;
  }
};

// LinearOps::arrange.
inline void arrange_bf16x3(const float* x, int num_in, int row, int num_rows, uint8_t* to) {
  const TermTiles tiles(num_rows);
  const int tile = row / tiles.height, first = tiles.first(tile);
  const int stride = tiles.rows(tile) * kTermBytes;
  to += tiles.byte_offset(tile, round_up(num_in, kBlock)) + (row - first) * kTermBytes;
  for (int at = 0; at < num_in; at += kBlock, to += kTerms * stride) {
    const int count = num_in - at;
    alignas(64) float padded[kBlock] = {};
    if (count < kBlock) memcpy(padded, x + at, sizeof(float) * count);
    const float* from = count < kBlock ? padded : x + at;
    split_bf16<kTerms>(load_f(from), load_f(from + kLanes), to, stride);
  }
}

// Some row tiles, in one block of inputs.
template <int R>
struct TermRows {
  const uint8_t* x[R];
  int64_t stride[R];  // from term to term
};

// A block's products of R row tiles, all terms, and P panels (one or two), onto the registers'
// sums. kPrefetch: with each product, its share of the lines at `next` is prefetched.
template <int R, int P, bool kPrefetch, int kDot = 0>
RL_INLINE void multiply_terms(const TermRows<R>& rows, const uint8_t* const* lines,
                              const uint8_t* const* next) {
  if constexpr (kDot < kTerms * R * P) {
    constexpr int p = kDot % P, r = kDot / P % R, term = kDot / (R * P);
    constexpr int kRow = kRowTile + (R > 1 ? r : term % 2), kWeight = kWeightTile + p;
    if (term == 0 && r == 0) load_tile<kWeight>(lines[p], kLineBytes);
    if (p == 0) load_tile<kRow>(rows.x[r] + term * rows.stride[r], kTermBytes);
    dot_tile_bf16<r * P + p, kRow, kWeight>();
    if constexpr (kPrefetch) {
      constexpr int kCall = term * R + r, kCalls = kTerms * R;
      for (int i = kTileRows * kCall / kCalls; i < kTileRows * (kCall + 1) / kCalls; ++i)
        __builtin_prefetch(next[p] + i * kLineBytes, 0, 3);
    }
    multiply_terms<R, P, kPrefetch, kDot + 1>(rows, lines, next);
  }
}

// Moves sums [row tile][panel][row][16] between memory and registers.
template <int kNum, bool kStore>
RL_INLINE void move_tiles(float* sums) {
  if constexpr (kNum > 0) {
    move_tiles<kNum - 1, kStore>(sums);
    float* const at = sums + (kNum - 1) * kTileRows * kPanel;
    if (kStore)
      store_tile<kNum - 1>(at, kLineBytes);
    else
      load_tile<kNum - 1>(at, kLineBytes);
  }
}

// Row tiles first .. end - 1 by inputs from_input .. to_input - 1 (whole blocks), added to the
// results of the inputs before.
struct TermSpan {
  int first, end, from_input, to_input;
};

// P panels times some row tiles.
template <int P>
struct TermPanels {
  const LinearArgs& a;
  const TermTiles& tiles;
  const int first_panel;
  const TermSpan& span;
  static constexpr int64_t kBlockBytes = kBlock / 2 * kLineBytes;
  alignas(64) float sums[2][P][kTileRows * kPanel];

  TermPanels(const LinearArgs& args, const TermTiles& all_tiles, int first,
             const TermSpan& the_span)
      : a(args), tiles(all_tiles), first_panel(first), span(the_span) {}

  // The sums of R tiles from `tile` on.
  template <int R>
  RL_INLINE void multiply(int tile) {
    const int from = span.from_input, to = span.to_input;
    const PackedWeight& w = a.weight;
    const uint8_t* lines[P];
    TermRows<R> rows;
    for (int p = 0; p < P; ++p)
      lines[p] = w.lines + (first_panel + p) * w.panel_bytes() + from / kBlock * kBlockBytes;
    for (int r = 0; r < R; ++r) {
      rows.stride[r] = tiles.rows(tile + r) * kTermBytes;
      rows.x[r] = static_cast<const uint8_t*>(a.x) + tiles.byte_offset(tile + r, w.padded_in()) +
                  from / kBlock * kTerms * rows.stride[r];
    }
    float* const at = sums[0][0];
    if (from)
      move_tiles<R * P, false>(at);
    else
      clear_tiles<R * P>();
    const bool prefetches = tile == span.first;  // the other tiles find the lines in the cache
    for (int input = from; input < to; input += kBlock) {
      if (prefetches) {
        const int64_t ahead =
            prefetch_distance(w.panel_bytes(), input / kBlock * kBlockBytes, P, kLinePrefetchBytes);
        const uint8_t* next[P];
        for (int p = 0; p < P; ++p) next[p] = lines[p] + ahead;
        multiply_terms<R, P, true>(rows, lines, next);
      } else {
        multiply_terms<R, P, false>(rows, lines, lines);
      }
      for (int p = 0; p < P; ++p) lines[p] += kBlockBytes;
      for (int r = 0; r < R; ++r) rows.x[r] += kTerms * rows.stride[r];
    }
    move_tiles<R * P, true>(at);
  }

  // For R tiles from `tile` on and every panel, calls visit(panel, first row, number of rows, their
  // sums, their results, outputs per row) with the rows among a.first_row .. a.end_row - 1.
  template <int R, class Visit>
  RL_INLINE void each_result(int tile, Visit visit) {
    for (int r = 0; r < R; ++r) {
      const int first = tiles.first(tile + r), begin = first < a.first_row ? a.first_row : first;
      const int next = first + tiles.rows(tile + r), end = next < a.end_row ? next : a.end_row;
      for (int p = 0; p < P; ++p) {
        const int panel = first_panel + p, left = a.weight.num_out - panel * kPanel;
        float* const out = a.out + (begin - a.first_row) * a.out_stride + panel * kPanel;
        visit(panel, begin, end - begin, sums[r][p] + (begin - first) * kPanel, out,
              left < kPanel ? left : kPanel);
      }
    }
  }

  // Reads the results so far.
  void read_results(int num_rows, float* row_sums, const float* out, int count) {
    for (; num_rows > 0; --num_rows, row_sums += kPanel, out += a.out_stride)
      store_f(row_sums, load_first(out, count));
  }

  // Writes results: as they are while inputs are missing, with bias once all are done.
  RL_INLINE void write_results(int panel, int row, int num_rows, const float* row_sums, float* out,
                               int count) {
    const bool done = span.to_input == a.weight.padded_in();
    if (count < kPanel) {
      for (int i = 0; i < num_rows; ++i, row_sums += kPanel, out += a.out_stride)
        if (done)
          write_row<Avx512Amx::Bf16, 1>(a, panel, row + i, row_sums);
        else
          memcpy(out, row_sums, sizeof(float) * count);
      return;
    }
    // -0 leaves every sum as it is.
    const Vf bias = done && a.weight.bias ? load_f(a.weight.bias + panel * kPanel) : set_f(-0.0f);
    const bool streams = done && streams_results<Avx512Amx>(a) &&
                         !((reinterpret_cast<uintptr_t>(out) | a.out_stride * sizeof(float)) & 63);
    for (int i = 0; i < num_rows; ++i, row_sums += kPanel, out += a.out_stride) {
      const Vf y = add_f(load_f(row_sums), bias);
      if (streams)
        stream_f(out, y);
      else
        store_f(out, y);
    }
  }

  template <int R>
  RL_INLINE void run_tiles(int tile) {
    if (span.from_input)
      each_result<R>(tile, [&](int, int, int num_rows, float* row_sums, float* out, int count) {
        read_results(num_rows, row_sums, out, count);
      });
    multiply<R>(tile);
    each_result<R>(tile,
                   [&](int panel, int row, int num_rows, float* row_sums, float* out, int count) {
                     write_results(panel, row, num_rows, row_sums, out, count);
                   });
  }
  void run() {
    int tile = span.first;
    for (; tile + 2 <= span.end; tile += 2) run_tiles<2>(tile);
    for (; tile < span.end; ++tile) run_tiles<1>(tile);
  }
};

// As many panels as come P at a time; returns the first one that is left.
template <int P>
int multiply_term_panels(const LinearArgs& a, const TermTiles& tiles, int first_panel,
                         int end_panel, const TermSpan& span) {
  for (; first_panel + P <= end_panel; first_panel += P)
    TermPanels<P>(a, tiles, first_panel, span).run();
  return first_panel;
}

// All panels times some row tiles and some inputs, which stay in the cache meanwhile; then the
// next.
inline void multiply_bf16x3(const LinearArgs& a, int first_panel, int end_panel) {
  const TermTiles tiles(a.num_rows);
  const ScopedTileConfig config(tiles.height, kTermBytes);
  const int first = a.first_row / tiles.height;
  const int num = (a.end_row - 1) / tiles.height + 1 - first;
  const int inputs = a.weight.padded_in(), blocks = inputs / kBlock;
  const int parts = (num + kSpanRowTiles - 1) / kSpanRowTiles;
  const int spans = num > kUncutRowTiles ? (inputs + kSpanInputs - 1) / kSpanInputs : 1;
  for (int part = 0; part < parts; ++part)
    for (int s = 0; s < spans; ++s) {
      const TermSpan span = {first + num * part / parts, first + num * (part + 1) / parts,
                             blocks * s / spans * kBlock, blocks * (s + 1) / spans * kBlock};
      const int left = multiply_term_panels<2>(a, tiles, first_panel, end_panel, span);
      multiply_term_panels<1>(a, tiles, left, end_panel, span);
    }
}

}  // namespace
}  // namespace ridgeline
