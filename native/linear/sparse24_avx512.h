// int8_sparse24 by vpexpandb (AVX-512 VBMI2), on variants with VNNI. See sparse24.h.
#pragma once
#include "linear/engine.h"
#include "linear/panels.h"
#include "linear/sparse24.h"
#include "simd/avx512.h"
#include "simd/compiler.h"
#include "simd/prefetch.h"

namespace ridgeline {
namespace {

constexpr int kSparseTileRows = 12;  // whose sums are in registers
constexpr int kSparseMaxRows = 24;   // more pass lines that were expanded once
constexpr int kSparseMinPacedInputs = 1024;  // smaller weights are in L2
constexpr int64_t kSparsePrefetch = 10240;   // bytes ahead
constexpr int kSparseBlockLines = kSparseBlockBytes / kLineBytes;

// Line `line` of a block, as int8 has it.
RL_INLINE Vi expand_line(const uint8_t* block, int line) {
  uint64_t mask;
  memcpy(&mask, block + 8 * line, sizeof mask);
  const uint8_t* const kept = block + kSparseMaskBytes + kLineBytes / 2 * line;
  return expand_bytes(_mm512_set1_epi8(-128), mask,
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kept)));
}

inline void expand_block_by_lines(const uint8_t* block, uint8_t* lines) {
  RL_UNROLL for (int line = 0; line < kSparseLines; ++line)
      store_i(lines + line * kLineBytes, expand_line(block, line));
}

// Panels times rows first_row .. first_row + kRows - 1. kDelay spaces prefetches (prefetch.h).
template <class V, int kDelay, int kRows>
void multiply_sparse_rows(const LinearArgs& a, int first_panel, int end_panel) {
  using Int8 = typename V::Int8;
  const PackedWeight& w = a.weight;
  const int block = block_of(w.group, V::kMaxBlock), per_block = block / kBlock;
  const int num_blocks = w.padded_in() / block;
  const int64_t step = int64_t{a.num_rows} * block;
  alignas(64) int32_t partial[kRows * kPanel];
  const uint8_t* at = w.lines + first_panel * w.panel_bytes();
  int64_t zero_offset = 0;  // zero, but it depends on the prefetches before it: see delay
  for (int panel = first_panel; panel < end_panel; ++panel) {
    const uint8_t* x = static_cast<const uint8_t*>(a.x) + int64_t{a.first_row} * block;
    Vi even[kRows], odd[kRows];
    RL_UNROLL for (int r = 0; r < kRows; ++r) {
      even[r] = set_i(-Int8::kMiddle * a.sums[a.first_row + r]);
      odd[r] = set_i(0);
    }
    for (int b = 0; b < num_blocks; ++b, x += step)
      for (int i = 0; i < per_block; ++i, at += kSparseBlockBytes) {
        RL_UNROLL for (int line = 0; line < kSparseLines; ++line) {
          if (line < kSparseBlockLines) {
            zero_offset = delay<kDelay>(zero_offset);
            __builtin_prefetch(at + kSparsePrefetch + line * kLineBytes + zero_offset, 0, 2);
          }
          const Vi weights = expand_line(at, line);
          const uint8_t* const four = x + i * kBlock + 4 * line;
          RL_UNROLL for (int r = 0; r < kRows; ++r) {
            Vi& sum = line % 2 ? odd[r] : even[r];
            sum = dot_u8s8_memory(sum, weights, four + r * block);
          }
        }
      }
    RL_UNROLL for (int r = 0; r < kRows; ++r)
        store_i(partial + r * kPanel, add_i(even[r], odd[r]));
    write_rows<Int8, 1>(a, panel, a.first_row, kRows, reinterpret_cast<const float*>(partial));
  }
}

template <class V, int kDelay, int kRows = kSparseTileRows>
void multiply_sparse_tile(const LinearArgs& a, int first_panel, int end_panel) {
  if constexpr (kRows > 1)
    if (a.end_row - a.first_row < kRows)
      return multiply_sparse_tile<V, kDelay, kRows - 1>(a, first_panel, end_panel);
  multiply_sparse_rows<V, kDelay, kRows>(a, first_panel, end_panel);
}

// Up to kSparseMaxRows rows; a second tile finds the panel's lines in the cache.
template <class V, int kDelay>
void multiply_few_sparse_rows(const LinearArgs& a, int first_panel, int end_panel) {
  const int num_rows = a.end_row - a.first_row;
  if (num_rows <= kSparseTileRows)
    return multiply_sparse_tile<V, kDelay>(a, first_panel, end_panel);
  LinearArgs first = a, second = a;
  first.end_row = second.first_row = a.first_row + num_rows / 2;
  second.out = a.out + (second.first_row - a.first_row) * a.out_stride;
  for (int panel = first_panel; panel < end_panel; ++panel) {
    multiply_sparse_tile<V, kDelay>(first, panel, panel + 1);
    multiply_sparse_tile<V, kDelay>(second, panel, panel + 1);
  }
}

// Returns false, having done nothing, where the weight has another kind or the CPU lacks VBMI2.
template <class V, int kDelay>
bool try_sparse24(const LinearArgs& a, int first_panel, int end_panel,
                  void (*dense)(const LinearArgs&, int, int)) {
  if (a.weight.kind != WeightKind::kInt8Sparse24 || !has_byte_expand()) return false;
  if (a.end_row - a.first_row > kSparseMaxRows)
    multiply_expanded(a, first_panel, end_panel, expand_block_by_lines, dense);
  else if (a.weight.num_in < kSparseMinPacedInputs)
    multiply_few_sparse_rows<V, 0>(a, first_panel, end_panel);
  else
    multiply_few_sparse_rows<V, kDelay>(a, first_panel, end_panel);
  return true;
}

}  // namespace
}  // namespace ridgeline
