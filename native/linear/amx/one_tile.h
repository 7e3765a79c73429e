// Up to 16 rows, one row tile, by AMX: weights with scales per group of 32, 64 or 128 inputs, one
// panel after the other.
//
// A pipeline of three groups, so that none waits for the one before it: while one group's lines are
// decoded, the group before it is multiplied and its sums are stored, and the one before that is
// scaled onto the results of its panel, which stay in registers. It is not drained between panels.
// The numbers and their order are those of all other kernels, so the bits are the same.
#pragma once
#include <string.h>

#include "linear/amx/tiles.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "simd/amx.h"
#include "simd/compiler.h"
#include "simd/prefetch.h"

namespace ridgeline {
namespace {

// Decoded lines and sums that are kept, in groups: what was just stored is not loaded at once.
constexpr int kPipelineSlots = 4;
// Lines are prefetched this far ahead, into L2 and from there into L1, a group's at once: spreading
// them over the group was slower.
constexpr int64_t kFarPrefetchBytes = 160 * kLineBytes, kNearPrefetchBytes = 32 * kLineBytes;
constexpr int kOneTileDelay = 1;  // more delay would hold back the instructions that follow

// kRows rows, a multiple of 4 (rows that the tile lacks are computed from zeros); groups of kSteps
// tiles of kInputs inputs.
template <int kRows, int kSteps, int kInputs, bool kMins>
struct OneTile {
  struct Place {
    int panel = 0, group = 0;
    int64_t at = 0;  // panel * groups + group
  };
  const LinearArgs& a;
  const int first_row, height;
  // Copied from the weight, whose functions would divide with every group.
  const int num_groups = a.weight.num_groups();
  const int64_t panel_bytes = a.weight.panel_bytes();
  const int64_t step_bytes = int64_t{kInputs} * a.num_rows;
  const bool is_int4 = a.weight.kind == WeightKind::kInt4;
  alignas(4096) uint8_t decoded[kPipelineSlots][kSteps][kTileRows * kLineBytes];
  alignas(64) int32_t sums[kPipelineSlots][kTileRows * kPanel];
  alignas(64) float row_scales[kTileRows], row_mins[kTileRows], partial[kRows * kPanel];

  OneTile(const LinearArgs& args, int first, int rows) : a(args), first_row(first), height(rows) {}

  RL_INLINE void advance(Place& place) const {
    ++place.at;
    if (++place.group == num_groups) place.group = 0, ++place.panel;
  }

  template <int kLines, class Decode>
  RL_INLINE void decode_steps(const uint8_t*& far, const Place& place,
                              uint8_t (*to)[kTileRows * kLineBytes], Decode decode_lines) {
    const uint8_t* line = a.weight.lines + place.panel * panel_bytes +
                          int64_t{place.group} * (kSteps * kLines * kLineBytes);
    for (int i = 0; i < kSteps * kLines; ++i) {
      far = delay<kOneTileDelay>(far + kLineBytes);
      __builtin_prefetch(far, 0, 2);
      __builtin_prefetch(line + kNearPrefetchBytes + i * kLineBytes, 0, 3);
    }
    for (int step = 0; step < kSteps; ++step, line += kLines * kLineBytes)
      decode_lines(line, kLines, to[step]);
  }

  RL_INLINE void decode(const uint8_t*& far, const Place& place, int slot) {
    if (is_int4) {
      const Vi zero = group_zeros(a.weight, place.at);
      decode_steps<kInputs / 8>(far, place, decoded[slot],
                                [zero](const uint8_t* line, int num, uint8_t* to) {
                                  decode_int4_lines(line, num, zero, to);
                                });
    } else {
      decode_steps<kInputs / 4>(
          far, place, decoded[slot],
          [](const uint8_t* line, int num, uint8_t* to) { sign_int8_lines(line, num, to); });
    }
  }

  RL_INLINE void multiply(const Place& place, int slot) {
    const int8_t* x = static_cast<const int8_t*>(a.x) + place.group * kSteps * step_bytes +
                      int64_t{first_row} * kInputs;
    load_tile<kRowTile>(x, kInputs);
    load_tile<kWeightTile>(decoded[slot][0], kLineBytes);
    zero_tile<0>();
    dot_tile_bytes<0, kRowTile, kWeightTile, false>();
    if constexpr (kSteps == 2) {
      load_tile<kRowTile + 1>(x + step_bytes, kInputs);
      load_tile<kWeightTile + 1>(decoded[slot][1], kLineBytes);
      dot_tile_bytes<0, kRowTile + 1, kWeightTile + 1, false>();
    }
    store_tile<0>(sums[slot], kLineBytes);
  }

  RL_INLINE void scale(const Place& place, int slot, Vf (&y)[kRows]) {
    const PackedWeight& w = a.weight;
    const int64_t from = int64_t{place.group} * a.num_rows + first_row;
    const Vf scale = group_scale_at(w, w.scales, w.steps, place.at, place.panel, place.group);
    const Vf scales = load_first(a.scales + from, height);
    store_f(row_scales, scales);
    if constexpr (kMins) store_f(row_mins, mul_f(to_f(load_first(a.sums + from, height)), scales));
    // GCC would take them from `scales` by two instructions each, on the port that tiles use.
    asm volatile("" ::: "memory");
    RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] =
        fma_f(float_of(sums[slot] + r * kPanel), mul_f(scale, set_f(row_scales[r])), y[r]);
    if constexpr (kMins) {
      const Vf min = group_scale_at(w, w.mins, w.min_steps, place.at, place.panel, place.group);
      RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] = fma_f(min, set_f(row_mins[r]), y[r]);
    }
  }

  void run(int first_panel, int end_panel) {
    const int64_t num = int64_t{end_panel - first_panel} * num_groups;
    memset(sums, 0, sizeof sums);  // rows that the tile lacks
    Place to_decode = {first_panel, 0, int64_t{first_panel} * num_groups};
    Place to_multiply = to_decode, to_scale = to_decode;
    Vf y[kRows];
    RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] = set_f(0.0f);
    // Panels follow each other in memory.
    const uint8_t* far =
        a.weight.lines + first_panel * panel_bytes + kFarPrefetchBytes - kLineBytes;
    for (int64_t i = 0; i < num + 2; ++i) {
      if (i < num) decode(far, to_decode, i % kPipelineSlots), advance(to_decode);
      if (i >= 1 && i <= num) multiply(to_multiply, (i - 1) % kPipelineSlots), advance(to_multiply);
      if (i < 2) continue;
      scale(to_scale, (i - 2) % kPipelineSlots, y);
      if (to_scale.group == num_groups - 1) {
        RL_UNROLL for (int r = 0; r < kRows; ++r) store_f(partial + r * kPanel, y[r]),
            y[r] = set_f(0.0f);
        write_rows<Avx512Amx::Int4, 1>(a, to_scale.panel, first_row, height, partial);
      }
      advance(to_scale);
    }
  }
};

template <int kRows, bool kMins>
void multiply_one_tile(const LinearArgs& a, int first_row, int height, int first_panel,
                       int end_panel) {
  const auto run = [&](auto&& kernel) { kernel.run(first_panel, end_panel); };
  if (a.weight.group > kTileInputs)
    run(OneTile<kRows, 2, kTileInputs, kMins>(a, first_row, height));
  else if (a.weight.group == kTileInputs)
    run(OneTile<kRows, 1, kTileInputs, kMins>(a, first_row, height));
  else
    run(OneTile<kRows, 1, kBlock, kMins>(a, first_row, height));
}

template <int kRows>
void multiply_one_tile(const LinearArgs& a, int first_row, int height, int first_panel,
                       int end_panel) {
  if (a.weight.mins)
    multiply_one_tile<kRows, true>(a, first_row, height, first_panel, end_panel);
  else
    multiply_one_tile<kRows, false>(a, first_row, height, first_panel, end_panel);
}

// Rows first_row .. first_row + height - 1, at most 16, times some panels.
inline void multiply_one_tile(const LinearArgs& a, int first_row, int height, int first_panel,
                              int end_panel) {
  switch ((height + 3) / 4) {
    case 1: return multiply_one_tile<4>(a, first_row, height, first_panel, end_panel);
    case 2: return multiply_one_tile<8>(a, first_row, height, first_panel, end_panel);
    case 3: return multiply_one_tile<12>(a, first_row, height, first_panel, end_panel);
    default: return multiply_one_tile<kTileRows>(a, first_row, height, first_panel, end_panel);
  }
}

}  // namespace
}  // namespace ridgeline
