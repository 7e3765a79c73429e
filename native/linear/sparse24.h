// int8_sparse24: int8 weights of which two in four are stored (the layout is linear.h's).
//
// A step of one sequence waits for weights, so it gains by reading 5 bits of each where int8 has 8.
// Sums are exact in any order and all other weights are zero, so results have the bits of int8.
//
// Few rows: sparse24_avx512.h makes each line of int8 in a register. Many rows, and other
// instruction sets: panels are expanded to int8 in the calling thread's cache and multiplied there,
// by whatever multiplies int8 (AMX tiles included). That reads fewer bytes and does more work.
#pragma once
#include <string.h>

#include "linear/linear.h"

namespace ridgeline {

// Memory of the calling thread, aligned to a line; valid until the thread's next call.
uint8_t* thread_lines(int64_t bytes);

namespace {

// Bytes of int8 that all rows pass before the next panels are expanded: they stay in L2.
constexpr int64_t kExpandedBytes = 512 << 10;

// A block of int8_sparse24 as lines of int8.
inline void expand_block(const uint8_t* block, uint8_t* lines) {
  const uint8_t* kept = block + kSparseMaskBytes;
  memset(lines, 128, kSparseLines * kLineBytes);
  for (int line = 0; line < kSparseLines; ++line, block += 8, lines += kLineBytes) {
    uint64_t mask;
    memcpy(&mask, block, sizeof mask);
    for (; mask; mask &= mask - 1) lines[__builtin_ctzll(mask)] = *kept++;
  }
}

// Multiplies panels first_panel .. end_panel - 1 by `dense`, which multiplies int8.
inline void multiply_expanded(const LinearArgs& a, int first_panel, int end_panel,
                              void (*expand)(const uint8_t*, uint8_t*),
                              void (*dense)(const LinearArgs&, int, int)) {
  const int64_t panel_bytes = int64_t{a.weight.padded_in()} * kPanel;
  const int fitting = static_cast<int>(kExpandedBytes / panel_bytes) / 2 * 2;
  const int step = fitting < 2 ? 2 : fitting;
  const int most = end_panel - first_panel < step ? end_panel - first_panel : step;
  uint8_t* const lines = thread_lines(panel_bytes * most);
  for (int panel = first_panel; panel < end_panel; panel += step) {
    const int end = end_panel - panel < step ? end_panel : panel + step;
    LinearArgs part = a;
    part.weight = panels_of(a.weight, panel, end);
    part.out = a.out + int64_t{panel} * kPanel;
    const int64_t blocks = int64_t{end - panel} * a.weight.padded_in() / kBlock;
    for (int64_t b = 0; b < blocks; ++b)
      expand(part.weight.lines + b * kSparseBlockBytes, lines + b * kSparseLines * kLineBytes);
    part.weight.kind = WeightKind::kInt8;
    part.weight.lines = lines;
    dense(part, 0, end - panel);
  }
}

}  // namespace
}  // namespace ridgeline
