// Paged attention on the CPU: the argument record shared by every ISA variant.
//
// Legend: T query rows in the step, H query heads, G kv heads, D head dim, R runs, C keys per chunk.
#pragma once
#include <cstdint>

namespace ridgeline {

struct AttentionArgs {
  const float* q;        // [T, H, D], rows contiguous in D
  float* out;            // [T, H, D], contiguous
  const void* k;         // paged: element (block b, token t, head g, dim d) at
  const void* v;         //   b*stride_block + t*stride_token + g*stride_head + d
  int64_t q_stride_row, q_stride_head;
  int64_t stride_block, stride_token, stride_head;
  const int32_t* row_start;    // [R + 1]: rows of run r are row_start[r] .. row_start[r+1]-1
  const int32_t* computed;     // [R]: position of the run's first row
  const int32_t* table_start;  // [R + 1]: run r's blocks are table[table_start[r] ..]
  const int32_t* table;
  int num_runs, num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int window;     // keys a query may see, itself included; 0: all
  float softcap;  // scores become softcap * tanh(score / softcap); 0: off
  int num_threads;
};

// The reduction order, which makes the result of a row independent of batching, chunking and threads:
// keys are taken in tiles of kTile at absolute positions; a dot product adds dimension 0 first; a chunk
// of kChunk keys (absolute) keeps a running (max, sum, weighted values) over its tiles in ascending
// order; chunks are merged in ascending order. Rows share loads, never sums.
constexpr int kTile = 64;
constexpr int kChunk = 512;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows = 32;  // query rows (token, head in group) that share one pass over the keys

void attend_portable(const AttentionArgs& args);
#if defined(__x86_64__)
void attend_avx2(const AttentionArgs& args);
void attend_avx512(const AttentionArgs& args);
#endif

}  // namespace ridgeline
