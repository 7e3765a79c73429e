// int8 with a scale per output, by AMX tiles: weights are multiplied as they are in memory.
#pragma once
#include "linear/amx/tiles.h"
#include "linear/linear.h"
#include "simd/amx.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

// int8 whose sums start at zero: the 128 added to every weight is subtracted at the end.
struct Int8FromZero : Avx512Amx::Int8 {
  static Vf finish(const LinearArgs& a, const float* partial, int out, int row) {
    const Vi sum = load_i(reinterpret_cast<const int32_t*>(partial));
    return scale(a, add_i(sum, set_i(-kMiddle * a.sums[row])), out, row);
  }
};

// One step's products of R row tiles and P panels, onto the registers' sums. kPrefetch: with each
// product, its share of the lines `ahead` is prefetched.
template <int R, int P, bool kPrefetch, int kDot = 0>
RL_INLINE void multiply_step_bytes(const int8_t* const* x, int inputs, const uint8_t* const* lines,
                                   int64_t ahead) {
  if constexpr (kDot < R * P) {
    constexpr int p = kDot / R, r = kDot % R;
    constexpr int kRow = kRowTile + r % 2, kWeight = kWeightTile + p % 2;
    if (r == 0) load_tile<kWeight>(lines[p], kLineBytes);
    if (p == 0) load_tile<kRow>(x[r], inputs);
    dot_tile_bytes<r * P + p, kRow, kWeight, true>();
    if constexpr (kPrefetch) {
      const int share = inputs / 4 / R;
      for (int i = share * r; i < share * (r + 1); ++i)
        __builtin_prefetch(lines[p] + ahead + i * kLineBytes, 0, 3);
    }
    multiply_step_bytes<R, P, kPrefetch, kDot + 1>(x, inputs, lines, ahead);
  }
}

// Steps of R row tiles and two panels between two calls of keep_store_unit_awake. (One row tile
// waits for memory.)
template <int R>
constexpr int kStepsPerStore = R > 1 ? 8 : 4;

template <int R, int P, int kSum = 0>
RL_INLINE void store_sums(int32_t* sums) {  // [R * P][16][16]
  if constexpr (kSum < R * P) {
    store_tile<kSum>(sums + kSum * kTileRows * kPanel, kLineBytes);
    store_sums<R, P, kSum + 1>(sums);
  }
}

// P panels times some rows, R row tiles at a time.
template <int R, int P>
void multiply_int8_panels(const LinearArgs& a, int first_panel, const RowTiles& rows) {
  alignas(4096) int32_t sums[R * P][kTileRows * kPanel];  // stay in L1
  const PackedWeight& w = a.weight;
  const int inputs = block_of(w.group, kTileInputs), num_steps = w.padded_in() / inputs;
  const int64_t step_bytes = static_cast<int64_t>(a.num_rows) * inputs;
  const int64_t tile_bytes = int64_t{inputs} * kPanel, panel_bytes = w.panel_bytes();
  for (int tile = 0; tile < rows.num_tiles; tile += R) {
    const uint8_t* lines[P];
    const int8_t* x[R];
    for (int p = 0; p < P; ++p) lines[p] = w.lines + (first_panel + p) * panel_bytes;
    for (int r = 0; r < R; ++r)
      x[r] = static_cast<const int8_t*>(a.x) + int64_t{rows.row(tile + r)} * inputs;
    clear_tiles<R * P>();
    for (int step = 0; step < num_steps; ++step) {
      if (tile == 0)
        multiply_step_bytes<R, P, true>(
            x, inputs, lines,
            prefetch_distance(panel_bytes, step * tile_bytes, P, kLinePrefetchBytes));
      else
        multiply_step_bytes<R, P, false>(x, inputs, lines, 0);
      for (int p = 0; p < P; ++p) lines[p] += tile_bytes;
      for (int r = 0; r < R; ++r) x[r] += step_bytes;
      if (step % kStepsPerStore<R> == kStepsPerStore<R> - 1) keep_store_unit_awake<0>(sums[0]);
    }
    store_sums<R, P>(sums[0]);
    for (int r = 0; r < R; ++r)
      write_tile<Int8FromZero, P>(a, first_panel, rows.row(tile + r), rows.height,
                                  reinterpret_cast<const float*>(sums[r * P]), kPanel,
                                  kTileRows * kPanel);
  }
}

// As many panels as come P at a time; returns the first one that is left.
template <int R, int P>
int multiply_int8_panels(const LinearArgs& a, int first_panel, int end_panel,
                         const RowTiles& rows) {
  for (; first_panel + P <= end_panel; first_panel += P)
    multiply_int8_panels<R, P>(a, first_panel, rows);
  return first_panel;
}

inline void multiply_int8(const LinearArgs& a, int first_panel, int end_panel,
                          const RowTiles& rows) {
  if (rows.num_tiles > 1)
    multiply_int8_panels<2, 1>(a, multiply_int8_panels<2, 2>(a, first_panel, end_panel, rows),
                               end_panel, rows);
  else
    multiply_int8_panels<1, 1>(a, multiply_int8_panels<1, 2>(a, first_panel, end_panel, rows),
                               end_panel, rows);
}

}  // namespace
}  // namespace ridgeline
