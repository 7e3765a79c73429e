// What the AMX kernels for quantised weights share: decoding lines into tiles, scales of groups,
// and cutting rows into tiles.
//
// A weight tile is 16 lines of int8 (64 inputs of a panel) as they are in memory; int4 lines are
// decoded into such lines first, and bytes of int8_groups are made signed. A row tile is what
// QuantRows holds of 16 rows in one block of 64 inputs (32 where groups are of 32). The integer
// sums are those of the vector kernels, so the bits are the same.
#pragma once
#include <string.h>

#include "linear/engines_avx512.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "simd/amx.h"
#include "simd/avx512.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

constexpr int kTileInputs = 64;
// Lines that tiles load as they are in memory are prefetched into L1 this far ahead.
constexpr int64_t kLinePrefetchBytes = 20 * kLineBytes;

// Cuts rows first .. first + num_rows - 1 into tiles of the same height (in_pairs: one tile, or an
// even number). The last tile ends with the rows, so it may compute some rows of the one before it
// again.
struct RowTiles {
  int first, num_rows, height, num_tiles;
  RowTiles(int first_row, int rows, bool in_pairs) : first(first_row), num_rows(rows) {
    num_tiles = (rows + kTileRows - 1) / kTileRows;
    if (in_pairs && num_tiles > 1) num_tiles += num_tiles % 2;
    height = (rows + num_tiles - 1) / num_tiles;
  }
  int row(int tile) const {
    return first + (tile * height < num_rows - height ? tile * height : num_rows - height);
  }
};

// A group's integer sums, below 2^22 in size, as floats: by an addition and a subtraction, because
// the unit that converts is the one that scales, while the one that adds is idle.
RL_INLINE Vf float_of(const int32_t* sums) {
  const Vi biased = add_i(load_i(sums), set_i(0x4B400000));  // the bits of kIntegerOffset
  return _mm512_sub_ps(as_f(biased), set_f(kIntegerOffset));
}

// Decodes lines of int4 into signed lines of int8, their zeros subtracted.
RL_INLINE void decode_int4_lines(const uint8_t* line, int num_lines, Vi zero, uint8_t* to) {
  const Vi low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int i = 0; i < num_lines; ++i, line += kLineBytes, to += 2 * kLineBytes) {
    const Vi v = load_i(line);
    store_i(to, _mm512_sub_epi8(_mm512_and_si512(v, low), zero));
    store_i(to + kLineBytes, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), zero));
  }
}

// Makes lines of int8 (stored as q + 128) signed.
RL_INLINE void sign_int8_lines(const uint8_t* line, int num_lines, uint8_t* to) {
#pragma GCC unroll 8
  for (int i = 0; i < num_lines; ++i, line += kLineBytes, to += kLineBytes)
    store_i(to, _mm512_xor_si512(load_i(line), _mm512_set1_epi8(-128)));
}

// How far behind a place in a panel the line to prefetch is: near the panel's end it is in the
// panel num_panels further on, because the next ones are being read at the same time.
RL_INLINE int64_t prefetch_distance(int64_t panel_bytes, int64_t place, int num_panels,
                                    int64_t ahead) {
  return place + ahead < panel_bytes ? ahead : ahead + (num_panels - 1) * panel_bytes;
}

// The zeros of a group of a panel, each in the four bytes of its output. `at` = panel * groups +
// group.
RL_INLINE Vi group_zeros(const PackedWeight& w, int64_t at) {
  if (w.zeros) return mul_i(load_u8(w.zeros + at * kPanel), set_i(0x01010101));
  return set_i(w.kind == WeightKind::kInt4 && !w.mins ? 0x08080808 : 0);
}

// The scales (or minima) of a group of a panel.
RL_INLINE Vf group_scale_at(const PackedWeight& w, const uint16_t* halves, const int8_t* steps,
                            int64_t at, int panel, int group) {
  return steps ? group_scale(w, halves, steps, panel, group, 0) : load_f16(halves + at * kPanel);
}

// Writes rows first_row .. first_row + num_rows - 1 of P panels from their partial results, which
// for panel p and row r are at partial[p * panel_stride + r * row_stride].
template <class E, int P>
RL_INLINE void write_tile(const LinearArgs& a, int first_panel, int first_row, int num_rows,
                          const float* partial, int row_stride, int panel_stride) {
  const PackedWeight& w = a.weight;
  const int first = first_panel * kPanel;
  float* out = a.out + (first_row - a.first_row) * a.out_stride + first;
  if (first + P * kPanel > w.num_out) {
    for (int r = 0; r < num_rows; ++r)
      for (int p = 0; p < P; ++p)
        write_row<E, 1>(a, first_panel + p, first_row + r,
                        partial + p * panel_stride + r * row_stride);
    return;
  }
  const bool streams = streams_results<Avx512Amx>(a) && !(reinterpret_cast<uintptr_t>(out) & 63) &&
                       a.out_stride % kPanel == 0;
  for (int r = 0; r < num_rows; ++r, out += a.out_stride) RL_UNROLL for (int p = 0; p < P; ++p) {
      Vf value = E::finish(a, partial + p * panel_stride + r * row_stride, first + p * kPanel,
                           first_row + r);
      if (w.bias) value = fma_f(value, set_f(1.0f), load_f(w.bias + first + p * kPanel));
      if (streams)
        stream_f(out + p * kPanel, value);
      else
        store_f(out + p * kPanel, value);
    }
}

}  // namespace
}  // namespace ridgeline
