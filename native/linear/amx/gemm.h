// Quantised weights times several rows, by AMX tiles: 16 rows x 64 inputs times 64 inputs x 16
// outputs per instruction.
#pragma once
#include "linear/amx/grouped.h"
#include "linear/amx/int8.h"
#include "linear/amx/one_tile.h"
#include "linear/amx/tiles.h"
#include "linear/linear.h"
#include "simd/amx.h"

namespace ridgeline {
namespace {

constexpr int kMinPanelsKept =
    4;  // all rows pass at least this many panels before the next are read
// Bytes of packed weights that all rows pass before the next are read.
constexpr int64_t kCachedWeightBytes = 256 << 10;

// Up to this many rows, vectors are as fast where there are groups, whose ends take tiles as long
// as many products.
inline int max_vector_rows(const PackedWeight& w) {
  if (!has_groups(w.kind)) return 0;
  return w.group < kTileInputs ? 10 : w.group == kTileInputs ? 5 : 2;
}

// Rows that stay in the cache, by panels that do, in blocks of rows whose partial results do.
inline void multiply_cached_rows(const LinearArgs& a, int first_row, int num_rows, int first_panel,
                                 int end_panel) {
  const PackedWeight& w = a.weight;
  const int blocks = (num_rows + kMaxGroupedRows - 1) / kMaxGroupedRows;
  const int64_t most = kCachedWeightBytes / w.panel_bytes() / kMinPanelsKept * kMinPanelsKept;
  const int step = static_cast<int>(most > kMinPanelsKept ? most : kMinPanelsKept);
  for (int from = first_panel; from < end_panel; from += step) {
    const int to = end_panel - from < step ? end_panel : from + step;
    for (int b = 0; b < blocks; ++b) {
      const int begin = static_cast<int>(int64_t{num_rows} * b / blocks);
      const int end = static_cast<int>(int64_t{num_rows} * (b + 1) / blocks);
      const RowTiles rows(first_row + begin, end - begin, !has_groups(w.kind));
      const int inputs = block_of(w.group, kTileInputs);
      if (has_groups(w.kind) && rows.num_tiles > 1) {
        const ScopedTileConfig config(rows.height, inputs, kHeldRows, kHeldWeights);
        multiply_grouped(a, from, to, rows);
        continue;
      }
      const ScopedTileConfig config(rows.height, inputs);
      if (has_groups(w.kind))
        multiply_one_tile(a, rows.first, rows.height, from, to);
      else
        multiply_int8(a, from, to, rows);
    }
  }
}

// Returns false, having done nothing, where tiles do not fit the weight or would not be faster.
inline bool try_gemm(const LinearArgs& a, int first_panel, int end_panel) {
  const PackedWeight& w = a.weight;
  const bool fits = w.group == 32 || w.group == kTileInputs || w.group == 2 * kTileInputs;
  const int num_rows = a.end_row - a.first_row;
  if (takes_floats(w.kind) || (has_groups(w.kind) && !fits) || num_rows <= max_vector_rows(w))
    return false;
  constexpr int64_t kCached = Avx512Amx::kCachedRowBytes;
  const int64_t parts = (int64_t{num_rows} * w.padded_in() + kCached - 1) / kCached;
  for (int64_t part = 0; part < parts; ++part) {
    const int begin = static_cast<int>(num_rows * part / parts);
    const int end = static_cast<int>(num_rows * (part + 1) / parts);
    if (end > begin)
      multiply_cached_rows(a, a.first_row + begin, end - begin, first_panel, end_panel);
  }
  return true;
}

}  // namespace
}  // namespace ridgeline
