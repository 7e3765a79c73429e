// What kernels on AMX tiles share: which register holds what, the registers' shapes, and floats
// split into bfloat16.
#pragma once
#include <stdint.h>

#include "simd/amx_instructions.h"  // IWYU pragma: export
#include "simd/avx512.h"

namespace ridgeline {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;

// The first register of rows and the first of weights; those below hold sums. A register of sums is
// free again only when its last product has ended and it is stored, three products later: so there
// are four of them.
constexpr int kRowTile = 4, kWeightTile = 6;

// A tile store that comes 0.8 us or more after the last one takes 0.25 us longer
// (docs/concepts/kernels.md). This stores register kTile to scratch memory where that was measured
// to pay.
template <int kTile>
inline void keep_store_unit_awake(void* scratch) {
  store_tile<kTile>(scratch, kTileBytes);
}

// Splits 32 floats into kTerms bfloat16 that add up to them, `stride` bytes apart. Each term takes
// the upper 16 bits of what the terms before it leave; the last of two is rounded, three are exact.
// An infinity leaves no remainder with three terms, and is not allowed with two.
template <int kTerms>
inline void split_bf16(Vf x, Vf y, void* to, int64_t stride) {
  const auto remainder = [](Vf v) {
    const Vi bits = as_i(v);
    const Vf cut = as_f(_mm512_and_si512(bits, set_i(static_cast<int32_t>(0xFFFF0000u))));
    if constexpr (kTerms == 2) return _mm512_sub_ps(v, cut);
    const Vi magnitude = _mm512_and_si512(bits, set_i(0x7FFFFFFF));
    return _mm512_maskz_sub_ps(_mm512_cmple_epi32_mask(magnitude, set_i(0x7F7FFFFF)), v, cut);
  };
  char* at = static_cast<char*>(to);
  for (int term = 1; term < kTerms; ++term, at += stride) {
    store_i(at, upper_i16(as_i(x), as_i(y)));
    x = remainder(x);
    y = remainder(y);
  }
  const Vi half = set_i(kTerms == 2 ? 0x8000 : 0);
  store_i(at, upper_i16(add_i(as_i(x), half), add_i(as_i(y), half)));
}

// Rows per tile when num_rows rows are cut into as few tiles as possible, as evenly as possible.
inline int tile_height(int num_rows) {
  const int tiles = (num_rows + kTileRows - 1) / kTileRows;
  return (num_rows + tiles - 1) / tiles;
}

// Clears the first kTiles registers.
template <int kTiles>
inline void clear_tiles() {
  if constexpr (kTiles > 0) {
    clear_tiles<kTiles - 1>();
    zero_tile<kTiles - 1>();
  }
}

// Configures the tile registers for as long as it lives: sums and rows of `rows` rows, rows of
// `inputs` bytes. Registers from row_tile on hold rows, those from weight_tile on hold weights.
class ScopedTileConfig {
 public:
  ScopedTileConfig(int rows, int inputs, int row_tile = kRowTile, int weight_tile = kWeightTile) {
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
      const bool is_weights = t >= weight_tile, is_rows = !is_weights && t >= row_tile;
      config.rows[t] = static_cast<uint8_t>(is_weights ? inputs / 4 : rows);
      config.row_bytes[t] = static_cast<uint16_t>(is_rows ? inputs : kTileBytes);
    }
    load_tile_config(config);
  }
  ~ScopedTileConfig() { release_tiles(); }
  ScopedTileConfig(const ScopedTileConfig&) = delete;
  ScopedTileConfig& operator=(const ScopedTileConfig&) = delete;
};

}  // namespace
}  // namespace ridgeline
