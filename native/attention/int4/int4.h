// A cache in INT4 (KIVI, arXiv 2402.02750) and how attention over it is called; the layout of its
// tiles is stated in ridgeline/engine/attention/int4/format.py.
//
// Tokens are in groups of kInt4Group, a block each. A query sees the groups before its own in 4
// bits, and its own group in INT8, up to itself. A tile is a group of one head, keys or values:
//
//   keys     words [D / 8][32] of eight dimensions of a token     scales [D]      mins [D]
//   values   words [4][D] of eight tokens of a dimension          scales [D/32][32]  mins
//   [D/32][32]
//
// A word holds the codes 0 4 1 5 in the low halves of its bytes and 2 6 3 7 in the high ones;
// scales and mins are float16. A number is code * scale + min: of its channel for keys, of its
// token and 32 channels for values.
#pragma once
#include <cstdint>

namespace ridgeline {

constexpr int kInt4Group = 32;  // tokens of a group, and channels that share a value's range

inline int64_t int4_tile_bytes(int head_dim) {
  return int64_t{kInt4Group} * (head_dim / 2 + head_dim / 8);
}

// Where the groups in 4 bits are: block b of head g starts at byte b*stride_block + g*stride_head.
struct Int4Groups {
  const char *k, *v;
  int64_t stride_block, stride_head;
  const int32_t* table_start;  // [R]: group i of run r is block table[table_start[r] + i]
  const int32_t* table;
};

}  // namespace ridgeline
