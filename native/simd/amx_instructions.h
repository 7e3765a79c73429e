// The AMX instructions, as assembly: they need no compiler flag. native/tests/emulation has a twin
// of this file that follows the manual in plain loops.
//
// There are eight tile registers of up to 16 rows x 64 bytes.
#pragma once
#include <stdint.h>

namespace ridgeline {
namespace {

// Rows and bytes per row of the eight registers, as LDTILECFG reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
inline void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
inline __attribute__((always_inline)) void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline __attribute__((always_inline)) void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline __attribute__((always_inline)) void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// kSum += kRows * kWeights, of bytes.
template <int kSum, int kRows, int kWeights, bool kUnsignedWeights, bool kUnsignedRows = false>
inline __attribute__((always_inline)) void dot_tile_bytes() {
  if constexpr (kUnsignedRows)
    asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
  else if constexpr (kUnsignedWeights)
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
  else
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}

// kSum += kRows * kWeights, of pairs of bfloat16: the even and the odd ones of a row are summed in
// a chain each, then both are added.
template <int kSum, int kRows, int kWeights>
inline __attribute__((always_inline)) void dot_tile_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}

}  // namespace
}  // namespace ridgeline
