// INT4 for many rows where there is no dot product of bytes, on vectors of 256 bits: products of
// pairs are added in 16 bits (vpmaddubsw, vpaddw) and widened once per block (vpmaddwd, vpaddd).
//
// Lines are decoded beforehand, and a block of a tile is one piece of assembly: GCC 12 puts a
// tile's 16-bit and 32-bit sums into the same sixteen registers and spills both. Here the 32-bit
// sums are in L1, where each block adds to them, and so are the results, to which each group adds.
// On a Zen 3, whose two multiplying ports are also two of its adding ports, a product and its
// addition take 0.62 cycles at best, and 0.70 with widening (measured: docs/concepts/kernels.md).
#pragma once
#include "linear/engines_avx2.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "simd/avx2.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

alignas(32) constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr int kMaddubsRows = 6;     // of a tile: with two vectors of outputs each, 12 registers
constexpr int kMaddubsBlocks = 16;  // inputs decoded at once: 512
constexpr int kMaddubsPrefetchBlocks = 2;  // blocks from the rows multiplied to those prefetched

// clang-format off

// Step S's weights of 16 outputs.
#define STEP(S) "vmovdqa 64*" #S "(%[at]), %%ymm12\n\tvmovdqa 64*" #S "+32(%[at]), %%ymm13\n\t"

// Row R's products of step S: the first of its sums A and B, or added to them; then the sums widened
// and added to memory.
#define FIRST_PRODUCTS(S, R, A, B)                                             \
  "vpbroadcastd 32*" #R "+4*" #S "(%[x]), %%ymm14\n\t"                         \
  "vpmaddubsw %%ymm14, %%ymm12, %%ymm" #A "\n\t"                               \
  "vpmaddubsw %%ymm14, %%ymm13, %%ymm" #B "\n\t"
#define MORE_PRODUCTS(S, R, A, B)                                              \
  "vpbroadcastd 32*" #R "+4*" #S "(%[x]), %%ymm14\n\t"                         \
  "vpmaddubsw %%ymm14, %%ymm12, %%ymm15\n\t"                                   \
  "vpmaddubsw %%ymm14, %%ymm13, %%ymm14\n\t"                                   \
  "vpaddw %%ymm15, %%ymm" #A ", %%ymm" #A "\n\t"                               \
  "vpaddw %%ymm14, %%ymm" #B ", %%ymm" #B "\n\t"
#define WIDEN(A) "vpmaddwd (%[ones]), %%ymm" #A ", %%ymm" #A "\n\t"
#define ADD_SUMS(A) "vpaddd 32*" #A "(%[sums]), %%ymm" #A ", %%ymm" #A "\n\t"
#define STORE_SUMS(A) "vmovdqa %%ymm" #A ", 32*" #A "(%[sums])\n\t"
#define WIDEN_ROW(S, R, A, B) WIDEN(A) ADD_SUMS(A) STORE_SUMS(A) WIDEN(B) ADD_SUMS(B) STORE_SUMS(B)

#define ROWS_1(DO, S) DO(S, 0, 0, 1)
#define ROWS_2(DO, S) ROWS_1(DO, S) DO(S, 1, 2, 3)
#define ROWS_3(DO, S) ROWS_2(DO, S) DO(S, 2, 4, 5)
#define ROWS_4(DO, S) ROWS_3(DO, S) DO(S, 3, 6, 7)
#define ROWS_5(DO, S) ROWS_4(DO, S) DO(S, 4, 8, 9)
#define ROWS_6(DO, S) ROWS_5(DO, S) DO(S, 5, 10, 11)

// The pointers advance in here too: GCC would pair them in a vector, behind all that is multiplied.
#define MULTIPLY_BLOCK(ROWS)                                                                       \
  asm volatile(STEP(0) ROWS(FIRST_PRODUCTS, 0) STEP(1) ROWS(MORE_PRODUCTS, 1)                      \
               STEP(2) ROWS(MORE_PRODUCTS, 2) STEP(3) ROWS(MORE_PRODUCTS, 3)                       \
               STEP(4) ROWS(MORE_PRODUCTS, 4) STEP(5) ROWS(MORE_PRODUCTS, 5)                       \
               STEP(6) ROWS(MORE_PRODUCTS, 6) STEP(7) ROWS(MORE_PRODUCTS, 7) ROWS(WIDEN_ROW, 8)    \
               "add $8*64, %[at]\n\tadd %[block_bytes], %[x]"                                      \
               : [at] "+r"(at), [x] "+r"(x)                                                        \
               : [block_bytes] "r"(block_bytes), [sums] "r"(sums), [ones] "r"(kOnes)               \
               : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",   \
                 "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

// clang-format on

// Adds a decoded block's products to `sums` [kRows][16].
template <int kRows>
RL_INLINE void multiply_maddubs_block(int32_t* sums, int64_t block_bytes, const uint8_t*& at,
                                      const uint8_t*& x) {
  static_assert(steps<Avx2::Int4>() == 8 && kRows <= kMaddubsRows, "the assembly is for 8 steps");
  if constexpr (kRows == 1) MULTIPLY_BLOCK(ROWS_1);
  if constexpr (kRows == 2) MULTIPLY_BLOCK(ROWS_2);
  if constexpr (kRows == 3) MULTIPLY_BLOCK(ROWS_3);
  if constexpr (kRows == 4) MULTIPLY_BLOCK(ROWS_4);
  if constexpr (kRows == 5) MULTIPLY_BLOCK(ROWS_5);
  if constexpr (kRows == 6) MULTIPLY_BLOCK(ROWS_6);
}

#undef STEP
#undef FIRST_PRODUCTS
#undef MORE_PRODUCTS
#undef WIDEN
#undef ADD_SUMS
#undef STORE_SUMS
#undef WIDEN_ROW
#undef ROWS_1
#undef ROWS_2
#undef ROWS_3
#undef ROWS_4
#undef ROWS_5
#undef ROWS_6
#undef MULTIPLY_BLOCK

struct MaddubsChunk {
  const LinearArgs& a;
  int group, num_groups;      // the first one, and how many
  const GroupParams* params;  // of each group
  const uint8_t* at;          // decoded steps
  const uint8_t* x;           // the first block, first row of all
};

// A chunk times kRows rows, onto their partial results [kRows][16].
template <int kRows>
RL_NOINLINE void multiply_maddubs_rows(const MaddubsChunk& c, int row, float* partial) {
  const PackedWeight& w = c.a.weight;
  const int per_group = w.group / kBlock;
  const int64_t num_rows = c.a.num_rows, block_bytes = num_rows * kBlock;
  const int64_t from = c.group * num_rows + row;
  const int32_t* row_sums = c.a.sums + from;
  const float* row_scales = c.a.scales + from;
  const uint8_t *at = c.at, *x = c.x + static_cast<int64_t>(row) * kBlock;
  alignas(32) int32_t sums[kRows * kPanel];
  const int32_t zero = w.mins ? 0 : Avx2::Int4::kMiddle;
  for (const GroupParams *group = c.params, *end = group + c.num_groups; group < end; ++group) {
    if (w.zeros) {
      RL_UNROLL for (int i = 0; i < kPanel; i += kLanes) RL_UNROLL for (int r = 0; r < kRows; ++r)
          store_i(sums + r * kPanel + i, mul_i(load_i(group->zero + i), set_i(-row_sums[r])));
    } else {
      RL_UNROLL for (int r = 0; r < kRows; ++r) RL_UNROLL for (int i = 0; i < kPanel; i += kLanes)
          store_i(sums + r * kPanel + i, set_i(-zero * row_sums[r]));
    }
    for (int b = 0; b < per_group; ++b) {
      RL_UNROLL for (int r = 0; r < kRows; r += 2)
          __builtin_prefetch(x + kMaddubsPrefetchBlocks * block_bytes + r * kBlock, 0, 3);
      multiply_maddubs_block<kRows>(sums, block_bytes, at, x);
    }
    RL_UNROLL for (int i = 0; i < kPanel; i += kLanes) {
      const Vf scale = load_f(group->scale + i);
      RL_UNROLL for (int r = 0; r < kRows; ++r) {
        float* y = partial + r * kPanel + i;
        const Vf sum = to_f(load_i(sums + r * kPanel + i));
        store_f(y, fma_f(sum, mul_f(scale, set_f(row_scales[r])), load_f(y)));
      }
    }
    if (w.mins) {
      RL_UNROLL for (int i = 0; i < kPanel; i += kLanes) RL_UNROLL for (int r = 0; r < kRows; ++r) {
        float* y = partial + r * kPanel + i;
        const Vf row_sum = set_f(static_cast<float>(row_sums[r]) * row_scales[r]);
        store_f(y, fma_f(load_f(group->min + i), row_sum, load_f(y)));
      }
    }
    row_sums += num_rows;
    row_scales += num_rows;
  }
}

template <int kRows>
void multiply_maddubs_tile(const MaddubsChunk& c, int row, int num_rows, float* partial) {
  if (num_rows == kRows) return multiply_maddubs_rows<kRows>(c, row, partial);
  if constexpr (kRows > 1) multiply_maddubs_tile<kRows - 1>(c, row, num_rows, partial);
}

// A panel times rows first_row .. first_row + num_rows - 1, at most kRowBlock.
inline void multiply_maddubs_panel(const LinearArgs& a, int panel, int first_row, int num_rows) {
  using Int4 = Avx2::Int4;
  alignas(64) float partial[kRowBlock * kPanel];
  alignas(64) uint8_t tile[kMaddubsBlocks * steps<Int4>() * kLineBytes];
  alignas(64) GroupParams params[kMaddubsBlocks];
  const PackedWeight& w = a.weight;
  const int per_group = w.group / kBlock, blocks = w.padded_in() / kBlock;
  const int most = kMaddubsBlocks / per_group * per_group;
  const int num_tiles = (num_rows + kMaddubsRows - 1) / kMaddubsRows;
  const uint8_t* line = w.lines + panel * w.panel_bytes();
  for (int r = 0; r < num_rows; ++r) Int4::clear<1>(a, first_row + r, partial + r * kPanel);
  for (int b = 0; b < blocks; b += most, line += most * Int4::kLines * kLineBytes) {
    const int count = blocks - b < most ? blocks - b : most;
    prefetch_chunk<Int4, 1>(&line, count);
    load_group_params<Int4>(w, panel, b / per_group, count / per_group, params);
    decode_chunk<Int4, 1>(&line, count, tile);
    const uint8_t* x = static_cast<const uint8_t*>(a.x) + int64_t{b} * a.num_rows * kBlock;
    const MaddubsChunk c = {a, b / per_group, count / per_group, params, tile, x};
    for (int t = 0, r = 0; t < num_tiles; ++t) {
      const int next = num_rows * (t + 1) / num_tiles;
      multiply_maddubs_tile<kMaddubsRows>(c, first_row + r, next - r, partial + r * kPanel);
      r = next;
    }
  }
  write_rows<Int4, 1>(a, panel, first_row, num_rows, partial);
}

inline void multiply_int4_maddubs(const LinearArgs& a, int first_panel, int end_panel) {
  for (int row = a.first_row; row < a.end_row; row += kRowBlock) {
    const int num_rows = a.end_row - row < kRowBlock ? a.end_row - row : kRowBlock;
    for (int p = first_panel; p < end_panel; ++p)
      if (num_rows > Avx2::kDirectMaxRows)
        multiply_maddubs_panel(a, p, row, num_rows);
      else
        multiply_panels<Avx2::Int4, 1>(a, p, row, num_rows);
  }
}

}  // namespace
}  // namespace ridgeline
