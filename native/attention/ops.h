// The AttentionOps of a variant of the instruction set.
#pragma once
#include <stdint.h>

#include "attention/attention.h"
#include "attention/formats.h"
#include "attention/fp8.h"
#include "attention/int4/kernel.h"
#include "attention/kernel.h"
#include "attention/kv_store.h"
#include "attention/scratch.h"
#include "attention/work.h"

namespace ridgeline {
namespace {

// The formats of a variant on vectors.
template <bool kVnniV, class Bf16 = Bfloat16>
struct VectorVariant {
  static constexpr bool kVnni = kVnniV, kHasTiles = false;
  using BfloatFormat = Bf16;
  using Tiles = NoTiles;
};

// Names a format to a generic lambda.
template <class F>
struct FormatTag {
  using Type = F;
};

// The functions of a variant `V`.
template <class V>
struct Kernels {
  using Memory = Workspace<Scratch<typename V::Tiles>>;
  using Int8Format = Int8<V::kVnni>;

  // Whether an item has enough rows that widening a tile for them is cheaper than widening it
  // again for each part. It is decided per item: in a step that carries a prompt, decoding runs
  // read as fast as ever.
  static bool has_many_rows(const AttentionItem& item) {
    return item.num_rows > 2 * Int8Format::kPartRows;
  }

  // Calls `run` with the format in which an item is computed.
  template <class Run>
  static void with_format(const AttentionArgs& a, const AttentionItem& item, const Run& run) {
    if constexpr (V::kHasTiles) {
      if (V::takes_bf16(a)) return run(FormatTag<typename V::Bf16>{});
      if (V::takes_int8(a, item)) return run(FormatTag<typename V::Int8>{});
    }
    if (a.kind == KvKind::kInt8 && has_many_rows(item))
      return run(FormatTag<WidenedInt8<V::kVnni>>{});
    with_merge_format(a, run);
  }

  // The same for merging, which does not depend on the rows of an item.
  template <class Run>
  static void with_merge_format(const AttentionArgs& a, const Run& run) {
    if constexpr (V::kHasTiles)
      if (V::takes_bf16(a)) return run(FormatTag<typename V::Bf16>{});
    switch (a.kind) {
      case KvKind::kFloat32: return run(FormatTag<Float32>{});
      case KvKind::kBfloat16: return run(FormatTag<typename V::BfloatFormat>{});
      case KvKind::kFloat16: return run(FormatTag<Float16>{});
      case KvKind::kFp8: return run(FormatTag<Fp8>{});
      case KvKind::kInt8: return run(FormatTag<Int8Format>{});
    }
  }

  static void run_unit(const AttentionWork& w, int unit, void* scratch) {
    Memory& memory = *static_cast<Memory*>(scratch);
    const int i = item_of(w, unit);
    with_format(w.args, w.items[i], [&](auto format) {
      attend_unit<typename decltype(format)::Type>(w, i, unit, memory);
    });
  }

  static void merge_item(const AttentionWork& w, int item, void* scratch) {
    if (num_units(w, item) == 1) return;
    Memory& memory = *static_cast<Memory*>(scratch);
    with_merge_format(w.args, [&](auto format) {
      merge_chunks<typename decltype(format)::Type>(w, item, memory);
    });
  }

  // AttentionOps::attend_partials: threads take one chunk of an item at a time.
  static void attend_partials(const AttentionArgs& a, const ContextPart& part) {
    ThreadMemory& shared = thread_memory();
    const int heads = heads_per_item(a), rows = rows_per_item(a);
    const int num_items = list_items(a, heads, rows, nullptr);
    AttentionItem* items = static_cast<AttentionItem*>(ThreadMemory::allocate(
        &shared, AttentionBuffer::kItems, int64_t{sizeof(AttentionItem)} * (num_items + 1)));
    int* offset = static_cast<int*>(ThreadMemory::allocate(&shared, AttentionBuffer::kOffsets,
                                                           int64_t{sizeof(int)} * (num_items + 1)));
    list_items(a, heads, rows, items);
    int64_t macs = 0;
    offset[0] = 0;
    for (int i = 0; i < num_items; ++i) {
      const int begin = part.begin(first_chunk(a, items[i]));
      offset[i + 1] = offset[i] + part.end(end_chunk(a, items[i])) - begin;
      macs += macs_of(a, items[i]) / part.num_ranks;
    }
    const int threads = threads_for(macs, a.num_threads), num_units = offset[num_items];
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Memory& memory = *static_cast<Memory*>(thread_memory().workspace.reserve(sizeof(Memory)));
#pragma omp for schedule(dynamic, 1)
      for (int unit = 0; unit < num_units; ++unit) {
        int low = 0, high = num_items;  // offset[low] <= unit < offset[high]
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          (offset[middle] <= unit ? low : high) = middle;
        }
        const AttentionItem& item = items[low];
        const int chunk = part.chunk(part.begin(first_chunk(a, item)) + unit - offset[low]);
        with_format(a, item, [&](auto format) {
          attend_partial<typename decltype(format)::Type>(a, part, item, chunk, memory);
        });
      }
    }
  }

  // AttentionOps::merge_partials.
  static void merge_partials(const AttentionArgs& a, const ContextPart* ranks, int first_row,
                             int end_row) {
    const int64_t num_rows = end_row - first_row;
    int64_t chunks = 0;
    for (int run = 0; run < a.num_runs; ++run) {
      const int64_t own = a.computed[run] / kChunkKeys + 1;
      chunks = own > chunks ? own : chunks;
    }
    const int64_t floats = chunks * a.num_heads * a.head_dim;
    const int threads = threads_for(num_rows * floats, a.num_threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Memory& memory = *static_cast<Memory*>(thread_memory().workspace.reserve(sizeof(Memory)));
#pragma omp for schedule(static)
      for (int row = first_row; row < end_row; ++row) {
        int low = 0, high = a.num_runs;  // row_start[low] <= row < row_start[high]
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          (a.row_start[middle] <= row ? low : high) = middle;
        }
        with_merge_format(a, [&](auto format) {
          merge_row<typename decltype(format)::Type>(a, ranks, low, row, memory);
        });
      }
    }
  }

  static void attend(const AttentionArgs& a) {
    AttentionWork w;
    plan(a, {&thread_memory(), ThreadMemory::allocate}, w);
    const int threads = threads_for(w.macs, a.num_threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      void* memory = thread_memory().workspace.reserve(sizeof(Memory));
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < w.num_units; ++i) run_unit(w, i, memory);
#pragma omp for schedule(static)
      for (int i = 0; i < w.num_merges; ++i) merge_item(w, i, memory);
    }
  }

  static AttentionOps ops(const char* isa) {
    return {isa,
            V::BfloatFormat::kRoundsToBf16,
            attend,
            store_rows,
            plan,
            run_unit,
            merge_item,
            sizeof(Memory),
            attend_partials,
            merge_partials,
            slots_of,
            Int4Work<V::kVnni>::attend};
  }
};

}  // namespace
}  // namespace ridgeline
