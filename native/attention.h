// Paged attention on the CPU: the argument records and the table shared by every ISA variant.
//
// Legend: T query rows in the step, H query heads, G kv heads, D head dim, R runs.
#pragma once
#include <cstdint>

namespace ridgeline {

// How the cache stores numbers. A tile is what one block of B tokens holds of one head's keys, or of its values:
// B rows of D numbers one behind the other in a float format; in int8 a code per number, a byte (-127 .. 127, plus
// 128), at `code_place`, and behind all codes one float per token, its scale: D + 4 bytes per token.
enum class KvKind { kFloat32, kBfloat16, kFloat16, kInt8 };
enum class KvSide { kKeys, kValues };

inline int64_t row_bytes(KvKind kind, int head_dim) {
  return kind == KvKind::kFloat32 ? 4 * head_dim : kind == KvKind::kInt8 ? head_dim + 4 : 2 * head_dim;
}

// Where the code of token t's dimension d stands in its tile, so that kernels find codes as they multiply them.
// Keys: word by word of four dimensions, the tokens' words side by side [D / 4][B][4]. Values: four tokens at a
// time, their codes of one dimension side by side [B / 4][D][4], tokens 0 2 1 3, so that a mask leaves the words of
// two neighbours, and a shift those of the other two. What four does not divide comes last: keys [B][D % 4], values
// [D][B % 4].
inline int64_t code_place(KvSide side, int B, int D, int t, int d) {
  const int along = side == KvSide::kKeys ? d : t, across = side == KvSide::kKeys ? t : d;
  const int64_t end = side == KvSide::kKeys ? D : B, width = side == KvSide::kKeys ? B : D, whole = end / 4 * 4;
  if (along >= whole) return whole * width + across * (end - whole) + (along - whole);
  const int within = along & 3, at = side == KvSide::kKeys ? within : (within & 1) << 1 | within >> 1;
  return (along - within) * width + 4 * across + at;
}

struct AttentionArgs {
  const float* q;        // [T, H, D], rows contiguous in D
  float* out;            // [T, H, D], contiguous
  const char* k;         // paged: the tile of (block b, head g) starts, in bytes, at
  const char* v;         //   b*stride_block + g*stride_head
  KvKind kind;
  int64_t q_stride_row, q_stride_head;
  int64_t stride_block, stride_head;
  const int32_t* row_start;    // [R + 1]: rows of run r are row_start[r] .. row_start[r+1]-1
  const int32_t* computed;     // [R]: position of the run's first row
  const int32_t* table_start;  // [R + 1]: run r's blocks are table[table_start[r] ..]
  const int32_t* table;
  int num_runs, num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int window;     // keys a query may see, itself included; 0: all
  float softcap;  // scores become softcap * tanh(score / softcap); 0: off
  int num_threads;  // at most so many; a small problem takes fewer
};

// The reduction order, which makes the result of a row independent of batching, chunking and threads:
// keys are taken in tiles of kTile at absolute positions; a dot product adds dimension 0 first (or is exact:
// whole numbers); within a tile the weighted values are added in ascending position (bfloat16 by pairs: of dimensions,
// or of positions, that are neighbours the odd one first; by tiles as the manual has it); a chunk of kChunk keys
// (absolute) keeps a running (max, sum, weighted values) over its tiles in ascending order; chunks are merged
// in ascending order. Rows share loads, never sums; a hidden key adds an exact zero, computed or left out.
constexpr int kTile = 64;
constexpr int kChunk = 512;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows = 192;  // query rows (token, head in group) that share one pass over the keys

// Rows of one head to be stored: row i, from `from + i*stride_from` floats on, becomes row within[i] of tiles[i].
struct StoreArgs {
  const float* from;
  int64_t stride_from;
  char* const* tiles;
  const int32_t* within;
  int num_rows, head_dim, block_size;
  KvKind kind;
  KvSide side;
};

// Rows of (token, head in group) pairs of one run, of `num_kv` kv heads from `kv_head` on: num_rows of each.
struct AttentionItem {
  int run, kv_head, num_kv, first_row, num_rows;
  int all_rows() const { return num_kv * num_rows; }
};

// A layer's attention cut into units, which threads take one by one in any order: an item, or a chunk of one that is worth so
// much that whoever had it would be waited for; a chunk's result is a partial in `floats`, and when all units are done such
// items are merged. Units go from the last item to the first.
struct AttentionWork {
  AttentionArgs args;
  const AttentionItem* items;
  const int* offset;  // [items + 1]: where the units of the items begin, the last item's first; null: a unit is an item
  float* floats;      // a partial for every unit
  int64_t num_floats;
  int num_items, num_units, num_merges, cut_rows, num_slots;  // cut_rows: the most of an item that is cut
  int64_t macs;  // multiplications that it is worth, reading included
};

// Memory that planning needs, by what it is for: it stays until the work is done. A caller may give null for
// kPartials and set `floats` later.
enum class AttentionHold { kItems, kOffsets, kPartials };
struct AttentionMemory {
  void* owner;
  void* (*hold)(void* owner, AttentionHold what, int64_t bytes);
};

struct AttentionOps {
  const char* isa;
  bool rounds_bfloat16;  // of a cache in bfloat16, queries (scaled) and weights are rounded to it
  void (*attend)(const AttentionArgs&);
  void (*store_rows)(const StoreArgs&);
  // The same as `attend`, by a caller with threads of its own; `desk`: desk_bytes, at a multiple of 64, of each.
  void (*plan)(const AttentionArgs&, const AttentionMemory&, AttentionWork&);
  void (*run_unit)(const AttentionWork&, int unit, void* desk);
  void (*merge_item)(const AttentionWork&, int item, void* desk);
  int64_t desk_bytes;
};

const AttentionOps& attention_ops_portable();
#if defined(__x86_64__)
const AttentionOps& attention_ops_avx2();
const AttentionOps& attention_ops_avxvnni();
const AttentionOps& attention_ops_avx512();
const AttentionOps& attention_ops_avx512vnni();
const AttentionOps& attention_ops_avx512pairs();
const AttentionOps& attention_ops_avx512amx();
#endif

}  // namespace ridgeline
