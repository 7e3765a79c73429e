// More rows than one tile holds, by AMX: weights with scales per group of 32, 64 or 128 inputs.
//
// The weights of up to 128 inputs of two panels stay in four tile registers while all rows of a
// block pass by, so that a product loads half a tile, all of it rows; two registers of sums are
// enough, since registers are renamed. The sums of each group go through memory (nothing else
// leaves a tile), and those of one row tile are scaled onto the partial results between the
// products of the next. Where two groups are processed at once, both are scaled onto results that
// are loaded once.
#pragma once
#include <string.h>

#include "linear/amx/tiles.h"
#include "linear/linear.h"
#include "simd/amx.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

// Tile registers: 0 and 1 hold sums, these rows and weights.
constexpr int kHeldRows = 2, kHeldWeights = 4, kMaxHeld = 4;
constexpr int64_t kGroupedPrefetchBytes =
    96 * kLineBytes;  // lines are prefetched into L2 this far ahead
constexpr int kMaxGroupedRows = Avx512Amx::kBlockRows;  // rows whose partial results stay in L1

// Lines to prefetch while a group is multiplied, some with each product: all at once, they would
// fill the queue of outstanding lines, and memory would idle afterwards.
template <int P>
struct SpreadPrefetch {
  const uint8_t* from[P];
  int num_bytes, lines_per_call;  // of each panel; both powers of two
  int panel = 0, at = 0;
  RL_INLINE void issue() {
    if (panel == P) return;
    const uint8_t* line = from[panel] + at;
    for (int i = 0; i < lines_per_call; ++i) __builtin_prefetch(line + i * kLineBytes, 0, 2);
    if ((at += lines_per_call * kLineBytes) == num_bytes) at = 0, ++panel;
  }
};

// The sums [16][16] of one row tile, P panels and kGroups groups; what they are scaled with, and
// the results they are added to. Rows that a tile lacks are zero.
template <int P, int kGroups>
struct GroupSums {
  int32_t* sums[P][kGroups];
  float* partial[P];
  alignas(64) float row_scales[kGroups][kTileRows], row_mins[kGroups][kTileRows];
  Vf scale[P][kGroups], min[P][kGroups];
};

template <int P, int kGroups, bool kMins>
RL_INLINE void scale_rows(const GroupSums<P, kGroups>& t, int p, int first, int num) {
  RL_UNROLL for (int i = first; i < first + num; ++i) {
    float* const at = t.partial[p] + i * kPanel;
    Vf y = load_f(at);
    RL_UNROLL for (int g = 0; g < kGroups; ++g) {
      const Vf by = mul_f(t.scale[p][g], set_f(t.row_scales[g][i]));
      y = fma_f(float_of(t.sums[p][g] + i * kPanel), by, y);
      if constexpr (kMins) y = fma_f(t.min[p][g], set_f(t.row_mins[g][i]), y);
    }
    store_f(at, y);
  }
}

// P panels times some rows; groups are the inputs of kSteps tiles.
template <int P, int kSteps, bool kMins>
struct GroupedPanels {
  static_assert(2 * P <= kMaxHeld);
  const LinearArgs& a;
  const int first_panel;
  const RowTiles& rows;
  // Copied from the weight, whose functions would divide with every group.
  const int num_groups = a.weight.num_groups();
  const int64_t panel_bytes = a.weight.panel_bytes();
  const int inputs = a.weight.group / kSteps;
  const int64_t step_bytes = static_cast<int64_t>(a.num_rows) * inputs;
  // Each kind of memory has its own part of the page: a load waits for stores whose addresses end
  // in the same 12 bits, and the store of a tile waits for its products.
  struct alignas(4096) Page {
    int32_t sums[kTileRows * kPanel];
    uint8_t decoded[kTileRows * kLineBytes];
    float partial[2][kTileRows * kPanel];
  };
  static constexpr int kPages = kMaxGroupedRows / kTileRows;
  static_assert(2 * kMaxHeld <= kPages && P <= 2);
  Page pages[kPages];  // not cleared as a whole: that takes as long as many products

  GroupedPanels(const LinearArgs& args, int first, const RowTiles& row_tiles)
      : a(args), first_panel(first), rows(row_tiles) {}

  void decode(int group, int held) {
    const PackedWeight& w = a.weight;
    const bool is_int4 = w.kind == WeightKind::kInt4;
    const int num_lines = w.group / (is_int4 ? 8 : 4);
    for (int p = 0; p < P; ++p) {
      const uint8_t* line =
          w.lines + (first_panel + p) * panel_bytes + int64_t{group} * num_lines * kLineBytes;
      const Vi zero = group_zeros(w, int64_t{first_panel + p} * num_groups + group);
      for (int step = 0; step < kSteps; ++step, line += num_lines / kSteps * kLineBytes) {
        uint8_t* to = pages[2 * p + held + step].decoded;
        if (is_int4)
          decode_int4_lines(line, num_lines / kSteps, zero, to);
        else
          sign_int8_lines(line, num_lines / kSteps, to);
      }
    }
  }

  // Loads the weight tiles: kTiles of each panel, one or two.
  template <int kTiles, int I = 0>
  RL_INLINE void hold_weights() {
    if constexpr (I < P * kTiles) {
      constexpr int at = I / kTiles * 2 + I % kTiles;
      load_tile<kHeldWeights + at>(pages[at].decoded, kLineBytes);
      hold_weights<kTiles, I + 1>();
    }
  }

  // Not inlined: inlined, it slowed the loops of many rows by 1 to 2 %.
  RL_NOINLINE void clear() {
    for (int tile = 0; tile < rows.num_tiles; ++tile)
      memset(pages[tile].partial, 0, sizeof(Page::partial));
    for (Page& page : pages)  // rows that a tile lacks
      memset(page.sums + rows.height * kPanel, 0,
             sizeof(int32_t) * (kTileRows - rows.height) * kPanel);
  }

  SpreadPrefetch<P> prefetch_during(int group, int num) const {
    const PackedWeight& w = a.weight;
    const int num_bytes = num * w.group * w.bits() / 8 * kPanel;
    const int lines = P * num_bytes / kLineBytes;
    SpreadPrefetch<P> prefetch = {{}, num_bytes, 1};
    while (prefetch.lines_per_call * rows.num_tiles * P * 2 < lines) prefetch.lines_per_call *= 2;
    const int64_t at = int64_t{group} * w.group * w.bits() / 8 * kPanel;
    for (int p = 0; p < P; ++p)
      prefetch.from[p] = w.lines + (first_panel + p) * panel_bytes + at +
                         prefetch_distance(panel_bytes, at, P, kGroupedPrefetchBytes);
    return prefetch;
  }

  // A row tile, of the inputs whose weights are held: registers from I on.
  template <int kTiles, int I = 0>
  RL_INLINE void load_rows(const int8_t* x) const {
    if constexpr (I < kTiles) {
      load_tile<kHeldRows + I>(x + I * step_bytes, inputs);
      load_rows<kTiles, I + 1>(x);
    }
  }

  // One row tile's products, and between them the scaling of the one before; and, as soon as
  // registers are free, the loads of the `next` one (or null).
  template <int kGroups, int kDot = 0>
  RL_INLINE void multiply(const int8_t* next, const GroupSums<P, kGroups>& to,
                          const GroupSums<P, kGroups>* before, SpreadPrefetch<P>& prefetch) const {
    constexpr int kTiles = kGroups * kSteps, kDots = P * kTiles;
    if constexpr (kDot < kDots) {
      constexpr int p = kDot / kTiles, tile = kDot % kTiles, group = tile / kSteps;
      constexpr int sum = kDot / kSteps % 2;
      prefetch.issue();
      if (tile % kSteps == 0) zero_tile<sum>();
      dot_tile_bytes<sum, kHeldRows + tile, kHeldWeights + 2 * p + tile, false>();
      if (p == P - 1 && next) load_tile<kHeldRows + tile>(next + tile * step_bytes, inputs);
      if (tile % kSteps == kSteps - 1) store_tile<sum>(to.sums[p][group], kLineBytes);
      if (before)
        scale_rows<P, kGroups, kMins>(*before, p, tile * kTileRows / kTiles, kTileRows / kTiles);
      multiply<kGroups, kDot + 1>(next, to, before, prefetch);
    }
  }

  // What the sums of a row tile will be scaled with.
  template <int kGroups>
  void load_row_params(int first_group, int tile, GroupSums<P, kGroups>& to) {
    for (int g = 0; g < kGroups; ++g) {
      const int64_t at = int64_t{first_group + g} * a.num_rows + rows.row(tile);
      const Vf scales = load_first(a.scales + at, rows.height);
      store_f(to.row_scales[g], scales);
      if constexpr (kMins)
        store_f(to.row_mins[g], mul_f(to_f(load_first(a.sums + at, rows.height)), scales));
    }
    for (int p = 0; p < P; ++p) to.partial[p] = pages[tile].partial[p];
  }

  // Groups first .. end - 1, kGroups at a time.
  template <int kGroups>
  void run_groups(int first, int end) {
    const PackedWeight& w = a.weight;
    alignas(64) GroupSums<P, kGroups> sums[2];
    for (int i = 0; i < 2 * P * kGroups; ++i)
      sums[i / (P * kGroups)].sums[i / kGroups % P][i % kGroups] = pages[i].sums;
    GroupSums<P, kGroups>*to = &sums[0], *before = nullptr;
    const int8_t* const x = static_cast<const int8_t*>(a.x);
    for (int group = first; group < end; group += kGroups) {
      Vf scale[P][kGroups], min[P][kGroups] = {};
      for (int g = 0; g < kGroups; ++g) {
        decode(group + g, g);
        for (int p = 0; p < P; ++p) {
          const int panel = first_panel + p;
          const int64_t at = int64_t{panel} * num_groups + group + g;
          scale[p][g] = group_scale_at(w, w.scales, w.steps, at, panel, group + g);
          if constexpr (kMins)
            min[p][g] = group_scale_at(w, w.mins, w.min_steps, at, panel, group + g);
        }
      }
      hold_weights<kGroups * kSteps>();
      const int8_t* from = x + group * kSteps * step_bytes;
      if (group == first) load_rows<kGroups * kSteps>(from + int64_t{rows.row(0)} * inputs);
      SpreadPrefetch<P> prefetch = prefetch_during(group, kGroups);
      for (int tile = 0; tile < rows.num_tiles; ++tile) {
        for (int p = 0; p < P; ++p)
          for (int g = 0; g < kGroups; ++g)
            to->scale[p][g] = scale[p][g], to->min[p][g] = min[p][g];
        load_row_params(group, tile, *to);
        const int8_t* next = nullptr;
        if (tile + 1 < rows.num_tiles)
          next = from + int64_t{rows.row(tile + 1)} * inputs;
        else if (group + kGroups < end)
          next = from + kGroups * kSteps * step_bytes + int64_t{rows.row(0)} * inputs;
        multiply<kGroups>(next, *to, before, prefetch);
        before = to;
        to = to == &sums[0] ? &sums[1] : &sums[0];
      }
    }
    if (before)
      for (int p = 0; p < P; ++p) scale_rows<P, kGroups, kMins>(*before, p, 0, kTileRows);
  }

  void run() {
    constexpr int kGroups = 2 / kSteps;
    const int even = num_groups / kGroups * kGroups;
    clear();
    run_groups<kGroups>(0, even);
    if (even < num_groups) run_groups<1>(even, num_groups);
    for (int tile = 0; tile < rows.num_tiles; ++tile)
      write_tile<Avx512Amx::Int4, P>(a, first_panel, rows.row(tile), rows.height,
                                     pages[tile].partial[0], kPanel, kTileRows * kPanel);
  }
};

template <int P>
void multiply_grouped_panels(const LinearArgs& a, int first_panel, const RowTiles& rows) {
  const bool two_steps = a.weight.group > kTileInputs, mins = a.weight.mins;
  if (two_steps && mins)
    GroupedPanels<P, 2, true>(a, first_panel, rows).run();
  else if (two_steps)
    GroupedPanels<P, 2, false>(a, first_panel, rows).run();
  else if (mins)
    GroupedPanels<P, 1, true>(a, first_panel, rows).run();
  else
    GroupedPanels<P, 1, false>(a, first_panel, rows).run();
}

inline void multiply_grouped(const LinearArgs& a, int first_panel, int end_panel,
                             const RowTiles& rows) {
  int panel = first_panel;
  for (; panel + 2 <= end_panel; panel += 2) multiply_grouped_panels<2>(a, panel, rows);
  if (panel < end_panel) multiply_grouped_panels<1>(a, panel, rows);
}

}  // namespace
}  // namespace ridgeline
