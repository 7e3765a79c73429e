#include "attention/amx.h"
#include "attention/bf16_dot.h"
#include "attention/ops.h"

namespace ridgeline {
namespace {

struct AmxVariant : VectorVariant<true, Bf16Dot> {
  static constexpr bool kHasTiles = true;
  using Tiles = AmxState;
  using Bf16 = Bf16Tiles;
  using Int8 = Int8Tiles;
  // bfloat16 always takes the same way, because its bits depend on it; int8 takes tiles where
  // vectors would need two parts.
  static bool takes_bf16(const AttentionArgs& a) {
    return a.kind == KvKind::kBfloat16 && Bf16Tiles::fits(a.head_dim);
  }
  static bool takes_int8(const AttentionArgs& a, const AttentionItem& item) {
    return a.kind == KvKind::kInt8 && item.num_rows > kInt8Rows &&
           Int8Tiles::fits(a.head_dim, a.block_size);
  }
};

}  // namespace

const AttentionOps& attention_ops_avx512amx() {
  static const AttentionOps ops = Kernels<AmxVariant>::ops("avx512amx");
  return ops;
}

}  // namespace ridgeline
