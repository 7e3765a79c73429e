// A thread's working memory for attention.
#pragma once
#include <stdint.h>

#include "attention/attention.h"
#include "attention/formats.h"
#include "attention/key_tile.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

// What the rows of an item have accumulated over the keys seen so far: running maximum, sum of
// weights, weighted values (in slots).
struct PartialSoftmax {
  float *max, *sum, *values;
  int num_slots;
  float* row(int r) const { return values + static_cast<int64_t>(r) * num_slots; }
};

// Keys, values and queries in the order in which they are multiplied. kMaxPartRows: rows that go
// through a tile of keys together.
template <int kMaxPartRows>
struct PackedTile {
  alignas(64) int32_t
      key_panels[kTileKeys * kMaxHeadDim];  // int8: only if blocks do not fit vectors
  alignas(64) int32_t value_quads[kTileKeys / 4 * kMaxHeadDim];  // likewise
  alignas(64) int32_t wide_key_panels[kTileKeys * kMaxHeadDim / 2];
  int32_t wide_value_quads[kTileKeys * kMaxHeadDim / 2];
  alignas(64) float wide_values[kTileKeys *
                                kMaxHeadDim];  // floats: [key][slot], if many rows read them
  alignas(64) int32_t queries[kMaxRows * kMaxHeadDim];  // a part of the rows at a time: [word][row]
  alignas(64) float scores[kMaxPartRows * kTileKeys];
  alignas(64) int32_t weights[kFloatRows * kTileKeys / 2];  // int8: pairs of 16 bits
};

// No AMX tiles.
struct NoTiles {
  static constexpr int kMaxPartRows = kFloatRows;
};

// Rows, the tile of keys at hand, and what comes next.
struct TileState {
  alignas(64) float key_scales[kTileKeys], value_scales[kTileKeys];
  float factor[kMaxRows];  // int8: a row's score per product of codes
  int32_t query_sum[kMaxRows];
  int32_t last_key[kMaxRows], first_key[kMaxRows];  // positions of the keys that a row sees
  int num_parts, part[kMaxRows + 1];  // rows part[i] .. part[i + 1] - 1 go through a tile together
  KeyTile tiles[2];
  // Float formats: rows of the tile and kv head at hand, and of those to prefetch.
  const char *rows[kTileKeys + kNearKeys], *next_rows[kTileKeys + kNearKeys];
  Int8Places copied;         // int8, where codes are copied or widened
  OfHead<Int8Places> codes;  // int8, read by few rows
  OfHead<PrefetchPlaces> near_prefetch,
      far_prefetch;  // the head that comes next, and one further on
  PrefetchQueue prefetch;
  const AttentionItem* next_item;  // null: there is none, or it is not known
  int next_row;                    // the first of its queries that is not prefetched yet
};

// Tiles is NoTiles or AmxState (amx.h).
template <class Tiles>
struct Scratch : PackedTile<Tiles::kMaxPartRows>, Tiles, TileState {};

}  // namespace
}  // namespace ridgeline
