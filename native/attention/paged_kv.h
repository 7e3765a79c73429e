// A layer's paged keys and values and the runs of a step, checked when they are made so that
// kernels need not check.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "simd/dispatch.h"

namespace ridgeline {

// Where one layer's keys and values are. Strides are in bytes; what a block holds of one head is
// contiguous.
struct PagedKv {
  char* k;
  char* v;
  KvKind kind;
  int num_blocks, block_size, num_kv_heads, head_dim;
  int64_t stride_block, stride_head;

  // Throws std::invalid_argument if they reach past `num_bytes`.
  void check(int64_t num_bytes) const {
    require(k && v, "the KV cache has no memory");
    require(num_blocks > 0 && block_size > 0 && num_kv_heads > 0,
            "KV cache counts must be positive");
    require(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim must be in 1..256");
    const int64_t head_bytes = block_size * row_bytes(kind, head_dim);
    require(stride_block > 0 && stride_head >= head_bytes,
            "KV cache strides must be positive and keep heads apart");
    const int64_t end =
        (num_blocks - 1) * stride_block + (num_kv_heads - 1) * stride_head + head_bytes;
    require(end <= num_bytes, "KV cache strides reach past its memory");
  }
};

// The runs of one step: which rows, which positions, which blocks.
struct AttentionPlan {
  std::vector<int32_t> row_start{0}, computed, table_start, table;
  std::vector<int32_t> block_of_row, within_block;  // where each row's keys and values are stored
  int num_blocks, block_size, table_end = 0;

  int num_rows() const { return row_start.back(); }

  // Adds a run of `count` rows from position `start` on, whose blocks are those that were added to
  // `table` since the last run. The first of them holds positions from first_place * block_size on:
  // a layer with a window has given back those before.
  void add_run(int start, int count, int first_place = 0) {
    const int begin = table_end, end = static_cast<int>(table.size()), first = begin - first_place;
    require(start >= 0 && count >= 0, "a run has a negative size or position");
    require(first_place >= 0 && start >= static_cast<int64_t>(first_place) * block_size,
            "a run begins before its block table");
    require(start + static_cast<int64_t>(count) <= static_cast<int64_t>(end - first) * block_size,
            "a run's block table is too short");
    for (int i = begin; i < end; ++i)
      require(table[i] >= 0 && table[i] < num_blocks, "a block id is outside the KV cache");
    for (int position = start; position < start + count; ++position) {
      block_of_row.push_back(table[first + position / block_size]);
      within_block.push_back(position % block_size);
    }
    row_start.push_back(row_start.back() + count);
    computed.push_back(start);
    table_start.push_back(first);
    table_end = end;
  }

  void check(const PagedKv& kv) const {
    require(block_size == kv.block_size && num_blocks <= kv.num_blocks,
            "plan and KV cache disagree about blocks");
  }

  // Bytes from kv.k (for values: kv.v) to the block of a row, first kv head.
  int64_t block_offset(const PagedKv& kv, int row) const {
    return block_of_row[row] * kv.stride_block;
  }
};

// Where one layer's groups in INT4 are (attention/int4/int4.h). Strides are in bytes.
struct Int4Kv {
  const char *k, *v;
  int num_blocks, num_kv_heads, head_dim;
  int64_t stride_block, stride_head;

  // Throws std::invalid_argument if they reach past `num_bytes`.
  void check(int64_t num_bytes) const {
    require(k && v, "the KV cache has no memory");
    require(num_blocks > 0 && num_kv_heads > 0, "KV cache counts must be positive");
    require(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kInt4Group == 0,
            "head_dim must be a multiple of 32 up to 256");
    require(stride_block > 0 && stride_head >= int4_tile_bytes(head_dim),
            "KV cache strides must be positive and keep heads apart");
    const int64_t end = (num_blocks - 1) * stride_block + (num_kv_heads - 1) * stride_head +
                        int4_tile_bytes(head_dim);
    require(end <= num_bytes, "KV cache strides reach past its memory");
  }
};

// The blocks of every run's groups in INT4.
struct Int4Tables {
  std::vector<int32_t> table_start{0}, table;
  int num_blocks;

  void add_run(const std::vector<int32_t>& blocks) {
    for (int32_t block : blocks) {
      require(block >= 0 && block < num_blocks, "a block id is outside the KV cache");
      table.push_back(block);
    }
    table_start.push_back(static_cast<int32_t>(table.size()));
  }

  // The groups before the last row's own one are read.
  void check(const AttentionPlan& plan, const PagedKv& recent, const Int4Kv& kv) const {
    require(num_blocks <= kv.num_blocks && table_start.size() == plan.computed.size() + 1,
            "tables, plan and KV cache disagree");
    require(recent.kind == KvKind::kInt8 && recent.block_size == kInt4Group &&
                recent.num_kv_heads == kv.num_kv_heads && recent.head_dim == kv.head_dim,
            "recent rows and groups in INT4 disagree");
    for (size_t run = 0; run < plan.computed.size(); ++run) {
      const int end = plan.computed[run] + plan.row_start[run + 1] - plan.row_start[run];
      require(end <= 0 || (end - 1) / kInt4Group <= table_start[run + 1] - table_start[run],
              "a run's block table is too short");
    }
  }

  Int4Groups groups(const Int4Kv& kv) const {
    return {kv.k, kv.v, kv.stride_block, kv.stride_head, table_start.data(), table.data()};
  }
};

// Where the partials of a step's rows are if the chunks of keys are on several ranks (ContextPart).
struct ContextPlan {
  int window, num_ranks;
  std::vector<std::vector<int64_t>> first_partial;  // [rank][row], and the number of all at the end

  ContextPlan(const AttentionPlan& plan, int window_, int num_ranks_)
      : window(window_), num_ranks(num_ranks_) {
    require(window >= 0 && num_ranks > 0, "window or number of ranks out of range");
    for (int rank = 0; rank < num_ranks; ++rank) {
      const ContextPart part = {rank, num_ranks, nullptr, nullptr};
      std::vector<int64_t> first{0};
      for (size_t run = 0; run < plan.computed.size(); ++run) {
        const int count = plan.row_start[run + 1] - plan.row_start[run];
        for (int position = plan.computed[run]; position < plan.computed[run] + count; ++position) {
          const int seen = window > 0 && position >= window ? position - window + 1 : 0;
          const int begin = part.begin(seen / kChunkKeys);
          first.push_back(first.back() + part.end(position / kChunkKeys + 1) - begin);
        }
      }
      first_partial.push_back(std::move(first));
    }
  }

  ContextPart part(int rank, uintptr_t partials) const {
    require(rank >= 0 && rank < num_ranks, "no such rank");
    return {rank, num_ranks, first_partial[rank].data(), reinterpret_cast<float*>(partials)};
  }
};

// How a layer attends: what its cache does not say.
struct AttentionParams {
  int num_heads;
  float scale;
  int window;     // 0: all
  float softcap;  // 0: none
  const float* sinks = nullptr;

  void check(const PagedKv& kv) const {
    require(num_heads > 0 && num_heads % kv.num_kv_heads == 0,
            "num_heads must be a multiple of kv heads");
    require(window >= 0 && softcap >= 0, "window or softcap out of range");
  }
};

inline AttentionArgs attention_args(const AttentionPlan& plan, const PagedKv& kv,
                                    const AttentionParams& params) {
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
  a.num_heads = params.num_heads;
  a.num_kv_heads = kv.num_kv_heads;
  a.head_dim = kv.head_dim;
  a.block_size = kv.block_size;
  a.scale = params.scale;
  a.window = params.window;
  a.softcap = params.softcap;
  a.sinks = params.sinks;
  a.num_threads = 1;
  return a;
}

}  // namespace ridgeline
