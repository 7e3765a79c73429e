// A layer's paged keys and values, and the runs of a step: checked when made, so that kernels need not.
#pragma once
#include <string>
#include <vector>

#include "attention.h"
#include "isa.h"

namespace ridgeline {

// Where one layer's K and V live, and how far its indices may reach. Strides and the end are in bytes; the tile of
// a block and head is contiguous.
struct PagedKv {
  char* k;
  char* v;
  KvKind kind;
  int num_blocks, block_size, num_kv_heads, head_dim;
  int64_t stride_block, stride_head;

  // Throws where they would reach past `num_bytes`.
  void check(int64_t num_bytes) const {
    require(k && v, "the KV cache has no memory");
    require(num_blocks > 0 && block_size > 0 && num_kv_heads > 0, "KV cache counts must be positive");
    require(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim must be in 1..256");
    const int64_t tile = block_size * row_bytes(kind, head_dim);
    require(stride_block > 0 && stride_head >= tile, "KV cache strides must be positive, tiles apart");
    const int64_t last = (num_blocks - 1) * stride_block + (num_kv_heads - 1) * stride_head + tile;
    require(last <= num_bytes, "KV cache strides reach past its memory");
  }
};

// The runs of one step: which rows, which positions, which blocks.
struct AttentionPlan {
  std::vector<int32_t> row_start{0}, computed, table_start{0}, table;
  std::vector<int32_t> block_of_row, within_block;  // where each row's keys and values go
  int num_blocks, block_size;

  int num_rows() const { return row_start.back(); }

  // A run of `count` rows from `start` on, its blocks at table[table_start.back()] and behind.
  void add_run(int start, int count) {
    const int first = table_start.back(), end = static_cast<int>(table.size());
    require(start >= 0 && count >= 0, "a run has a negative size or position");
    require(start + static_cast<int64_t>(count) <= static_cast<int64_t>(end - first) * block_size,
            "a run's block table is too short");
    for (int i = first; i < end; ++i) require(table[i] >= 0 && table[i] < num_blocks, "a block id is outside the KV cache");
    for (int position = start; position < start + count; ++position) {
      block_of_row.push_back(table[first + position / block_size]);
      within_block.push_back(position % block_size);
    }
    row_start.push_back(row_start.back() + count);
    computed.push_back(start);
    table_start.push_back(end);
  }

  void check(const PagedKv& kv) const {
    require(block_size == kv.block_size && num_blocks <= kv.num_blocks, "plan and cache disagree on the blocks");
  }

  // Where the tile of a row's first kv head stands, in bytes from kv.k (or, of its values, from kv.v).
  int64_t tile(const PagedKv& kv, int row) const { return block_of_row[row] * kv.stride_block; }
};

// How a layer attends: what its cache does not say.
struct AttentionSite {
  int num_heads;
  float scale;
  int window;     // 0: all
  float softcap;  // 0: none

  void check(const PagedKv& kv) const {
    require(num_heads > 0 && num_heads % kv.num_kv_heads == 0, "num_heads must be a multiple of kv heads");
    require(window >= 0 && softcap >= 0, "window or softcap out of range");
  }
};

inline AttentionArgs attention_args(const AttentionPlan& plan, const PagedKv& kv, const AttentionSite& site) {
  AttentionArgs a{};
  a.k = kv.k;
  a.v = kv.v;
  a.kind = kv.kind;
  a.stride_block = kv.stride_block;
  a.stride_head = kv.stride_head;
  a.row_start = plan.row_start.data();
  a.computed = plan.computed.data();
  a.table_start = plan.table_start.data();
  a.table = plan.table.data();
  a.num_runs = static_cast<int>(plan.computed.size());
  a.num_heads = site.num_heads;
  a.num_kv_heads = kv.num_kv_heads;
  a.head_dim = kv.head_dim;
  a.block_size = kv.block_size;
  a.scale = site.scale;
  a.window = site.window;
  a.softcap = site.softcap;
  a.num_threads = 1;
  return a;
}

}  // namespace ridgeline
