// The LinearOps of a variant `V` (Portable, Avx2, Avx512Vnni, ...), to which the file of each
// variant adds what only that one has.
#pragma once
#include "linear/engine.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "linear/rows.h"
#include "linear/sparse24.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

template <class V>
struct Kernels {
  static void multiply(const LinearArgs& a, int first_panel, int end_panel) {
    using Int8 = typename V::Int8;
    switch (a.weight.kind) {
      case WeightKind::kInt4:
        return multiply_with_block_size<typename V::Int4>(a, first_panel, end_panel);
      case WeightKind::kInt8: return multiply_with_block_size<Int8>(a, first_panel, end_panel);
      case WeightKind::kBf16: return multiply_with<typename V::Bf16>(a, first_panel, end_panel);
      case WeightKind::kFp32: return multiply_with<typename V::Fp32>(a, first_panel, end_panel);
      case WeightKind::kInt8Sparse24:
        return multiply_expanded(a, first_panel, end_panel, expand_block, multiply);
      case WeightKind::kInt8Groups:
        return a.weight.group < kBlock
                   ? multiply_with<GroupedInt8<Int8, kBlock / 2>>(a, first_panel, end_panel)
                   : multiply_with_block_size<GroupedInt8<Int8, kBlock>>(a, first_panel, end_panel);
    }
  }

  static int x_bytes(WeightKind kind) {
    if (kind == WeightKind::kInt4) return steps<typename V::Int4>() * 4 / kBlock;
    if (takes_floats(kind)) return sizeof(float);
    return steps<typename V::Int8>() * 4 / kBlock;
  }

  template <void (*kQuantiseBlock)(const float*, Vf, int8_t*, Vi&)>
  static LinearOps ops(const char* isa) {
    constexpr int kMaxBlock = V::kMaxBlock;
    return {isa,
            kMaxPanels,
            kMaxBlock,
            V::kCachedRowBytes,
            V::kBlockRows,
            0,
            quantise<kMaxBlock, kQuantiseBlock>,
            subtract_quantised<kMaxBlock>,
            sum_digits,
            x_bytes,
            widen_row<kMaxBlock>,
            nullptr,
            arrange_floats,
            multiply};
  }
};

}  // namespace
}  // namespace ridgeline
