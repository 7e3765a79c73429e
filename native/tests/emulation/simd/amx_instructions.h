// Twin of native/simd/amx_instructions.h: the instructions as Intel's manual describes them, in
// loops.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace ridgeline {
namespace {

struct TileConfig {
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
struct TileRegister {
  uint8_t bytes[16][64];
};
thread_local TileRegister tile_registers[8];
thread_local TileConfig tile_config;

inline void load_tile_config(const TileConfig& config) { tile_config = config; }
inline void release_tiles() {}

template <int kTile>
void load_tile(const void* from, int64_t stride) {
  for (int r = 0; r < tile_config.rows[kTile]; ++r)
    memcpy(tile_registers[kTile].bytes[r], static_cast<const uint8_t*>(from) + r * stride,
           tile_config.row_bytes[kTile]);
}
template <int kTile>
void store_tile(void* to, int64_t stride) {
  for (int r = 0; r < tile_config.rows[kTile]; ++r)
    memcpy(static_cast<uint8_t*>(to) + r * stride, tile_registers[kTile].bytes[r],
           tile_config.row_bytes[kTile]);
}
template <int kTile>
void zero_tile() {
  memset(&tile_registers[kTile], 0, sizeof(TileRegister));
}

template <int kSum, int kRows, int kWeights, bool kUnsignedWeights, bool kUnsignedRows = false>
void dot_tile_bytes() {
  for (int r = 0; r < tile_config.rows[kSum]; ++r)
    for (int n = 0; n < tile_config.row_bytes[kSum] / 4; ++n)
      for (int k = 0; k < tile_config.row_bytes[kRows]; ++k) {
        int32_t sum;
        uint8_t* at = tile_registers[kSum].bytes[r] + 4 * n;
        memcpy(&sum, at, 4);
        const uint8_t w = tile_registers[kWeights].bytes[k / 4][4 * n + k % 4];
        const uint8_t x = tile_registers[kRows].bytes[r][k];
        sum += (kUnsignedRows ? x : static_cast<int8_t>(x)) *
               (kUnsignedWeights ? w : static_cast<int8_t>(w));
        memcpy(at, &sum, 4);
      }
}

inline float bf16_at(const uint8_t* at) {  // subnormal numbers count as zero
  uint32_t bits = static_cast<uint32_t>(at[0] | at[1] << 8) << 16;
  if (!(bits & 0x7F800000u)) bits &= 0x80000000u;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <int kSum, int kRows, int kWeights>
void dot_tile_bf16() {
  for (int r = 0; r < tile_config.rows[kSum]; ++r)
    for (int n = 0; n < tile_config.row_bytes[kSum] / 4; ++n) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int k = 0; k < tile_config.row_bytes[kRows] / 4; ++k) {
        const uint8_t* a = tile_registers[kRows].bytes[r] + 4 * k;
        const uint8_t* b = tile_registers[kWeights].bytes[k] + 4 * n;
        even = fmaf(bf16_at(a), bf16_at(b), even);
        odd = fmaf(bf16_at(a + 2), bf16_at(b + 2), odd);
      }
      memcpy(&sum, tile_registers[kSum].bytes[r] + 4 * n, 4);
      sum += even + odd;
      memcpy(tile_registers[kSum].bytes[r] + 4 * n, &sum, 4);
    }
}

}  // namespace
}  // namespace ridgeline
