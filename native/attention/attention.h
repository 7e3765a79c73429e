// Paged attention on the CPU: the records and the function table that all variants share.
//
// Legend: T query rows in the step, H query heads, G kv heads, D head dim, R runs.
#pragma once
#include <cstdint>

#include "attention/int4/int4.h"

namespace ridgeline {

// How the cache stores numbers. What one block of B tokens holds of one head's keys, or of its
// values, is contiguous. In a float format it is B rows of D numbers. In int8 it is one code per
// number, a byte
// (-127 .. 127, plus 128) at `code_offset`, and behind all codes one float per token, its scale: D
// + 4 bytes per token. fp8 is stored like int8, with codes in E4M3.
enum class KvKind { kFloat32, kBfloat16, kFloat16, kInt8, kFp8 };
enum class KvSide { kKeys, kValues };

inline bool has_codes(KvKind kind) { return kind == KvKind::kInt8 || kind == KvKind::kFp8; }

inline int64_t row_bytes(KvKind kind, int head_dim) {
  return kind == KvKind::kFloat32 ? 4 * head_dim
         : has_codes(kind)        ? head_dim + 4
                                  : 2 * head_dim;
}

// Where the code of token t's dimension d is in its block, so that kernels read codes in the order
// in which they multiply them. Keys: words of four dimensions, the tokens' words side by side [D /
// 4][B][4]. Values: four tokens at a time, their codes of one dimension side by side [B / 4][D][4],
// in the order of tokens 0 2 1 3, so that a mask leaves 16-bit words of two neighbours and a shift
// those of the other two. What four does not divide comes last: keys [B][D % 4], values [D][B % 4].
inline int64_t code_offset(KvSide side, int B, int D, int t, int d) {
  const bool keys = side == KvSide::kKeys;
  const int along = keys ? d : t, across = keys ? t : d;
  const int64_t end = keys ? D : B, width = keys ? B : D, whole = end / 4 * 4;
  if (along >= whole) return whole * width + across * (end - whole) + (along - whole);
  const int within = along & 3, place = keys ? within : (within & 1) << 1 | within >> 1;
  return (along - within) * width + 4 * across + place;
}

struct AttentionArgs {
  const float* q;  // [T, H, D], rows contiguous in D
  float* out;      // [T, H, D], contiguous
  const char* k;   // paged: block b of head g starts at byte b*stride_block + g*stride_head
  const char* v;   // likewise
  KvKind kind;
  int64_t q_stride_row, q_stride_head;
  int64_t stride_block, stride_head;
  const int32_t* row_start;    // [R + 1]: rows of run r are row_start[r] .. row_start[r+1]-1
  const int32_t* computed;     // [R]: position of the run's first row
  const int32_t* table_start;  // [R]: position p of run r is in block table[table_start[r] + p / B]
  const int32_t* table;
  int num_runs, num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int window;       // keys that a query sees, itself included; 0: all
  float softcap;    // scores become softcap * tanh(score / softcap); 0: off
  int num_threads;  // at most; a small problem takes fewer
  // [H]: a logit of each head that takes part in the softmax and has no value; null: none
  const float* sinks;
};

// REDUCTION ORDER. It makes the result of a row independent of batching, chunking and threads. Keys
// are taken in tiles of kTileKeys at absolute positions. A dot product adds dimension 0 first (or
// is an exact integer). Within a tile the weighted values are added in ascending position.
// (bfloat16 dot products take pairs of neighbouring dimensions or positions, the odd one first; AMX
// tiles add as Intel's manual says.) A chunk of kChunkKeys keys at an absolute position keeps a
// running maximum, sum and weighted values over its tiles in ascending order; chunks are merged in
// ascending order. Rows share loads, never sums. A masked key adds an exact zero, whether it is
// computed or skipped.
constexpr int kTileKeys = 64;
constexpr int kChunkKeys = 512;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows =
    192;  // query rows (token, head in group) that share one pass over the keys

// Rows of one head to be stored: row i, from `from + i*stride_from` on, becomes row within[i] of
// the block at blocks[i].
struct StoreArgs {
  const float* from;
  int64_t stride_from;
  char* const* blocks;
  const int32_t* within;
  int num_rows, head_dim, block_size;
  KvKind kind;
  KvSide side;
};

// Rows of (token, head in group) pairs of one run and `num_kv` kv heads from `kv_head` on; num_rows
// of each head.
struct AttentionItem {
  int run, kv_head, num_kv, first_row, num_rows;
  int all_rows() const { return num_kv * num_rows; }
};

// A layer's attention cut into units that threads take in any order: an item, or one chunk of an
// item that is so large that the other threads would wait for it. The result of a chunk is a
// partial in `floats`; when all units are done, such items are merged. Units go from the last item
// to the first.
struct AttentionWork {
  AttentionArgs args;
  const AttentionItem* items;
  const int*
      offset;     // [items + 1]: first unit of each item, last item first; null: a unit is an item
  float* floats;  // a partial for every unit
  int64_t num_floats;
  int num_items, num_units, num_merges;
  int cut_rows;  // most rows of an item that is cut into chunks
  int num_slots;
  int64_t macs;  // estimated cost in multiply-adds, reads included
};

// The chunks of keys that one of several ranks has: chunk c is on rank c % num_ranks. Its partial of
// a row, one of these chunks and a head is num_slots weighted values, the largest score and the sum
// of the weights.
struct ContextPart {
  int rank, num_ranks;
  const int64_t* first_partial;  // [T + 1]: the row's first partial, among those of all rows
  float* partials;               // [partials, H, num_slots + 2]

  // The rank's chunks among first_chunk .. end_chunk - 1, counted from its own first one.
  int begin(int first_chunk) const { return (first_chunk + num_ranks - 1 - rank) / num_ranks; }
  int end(int end_chunk) const { return (end_chunk - 1 + num_ranks - rank) / num_ranks; }
  int chunk(int number) const { return number * num_ranks + rank; }
  int64_t partial_of(int64_t row, int row_first_chunk, int chunk) const {
    return first_partial[row] + chunk / num_ranks - begin(row_first_chunk);
  }
};

// Memory that planning needs, by purpose; it must stay valid until the work is done. For kPartials
// the caller may return null and set `floats` later.
enum class AttentionBuffer { kItems, kOffsets, kPartials };
struct AttentionAllocator {
  void* owner;
  void* (*allocate)(void* owner, AttentionBuffer buffer, int64_t bytes);
};

struct AttentionOps {
  const char* isa;
  bool rounds_to_bf16;  // with a bfloat16 cache, (scaled) queries and weights are rounded to it too
  void (*attend)(const AttentionArgs&);
  void (*store_rows)(const StoreArgs&);
  // `attend` in pieces, for a caller that manages its own threads. `scratch` has scratch_bytes bytes per
  // thread, 64-byte aligned.
  void (*plan)(const AttentionArgs&, const AttentionAllocator&, AttentionWork&);
  void (*run_unit)(const AttentionWork&, int unit, void* scratch);
  void (*merge_item)(const AttentionWork&, int item, void* scratch);
  int64_t scratch_bytes;
  // `attend` over the chunks that several ranks have: each computes the partials of its chunks, and
  // merging those of all ranks yields the bits of `attend`, for rows first_row .. end_row - 1.
  void (*attend_partials)(const AttentionArgs&, const ContextPart&);
  void (*merge_partials)(const AttentionArgs&, const ContextPart* ranks, int first_row, int end_row);
  int (*num_slots)(const AttentionArgs&);
  // Attention over a cache in INT4; the arguments are those of its recent rows, which are in INT8.
  void (*attend_int4)(const AttentionArgs&, const Int4Groups&);
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
