// Divides a step's attention among threads (see AttentionWork).
//
// Units are items (rows of one run and some kv heads); an item that is a large part of a thread's
// share (one long context, alone or among short ones) is cut into chunks, which are merged
// afterwards in the same ascending order as one thread would. An item of few rows takes many kv
// heads: a block's heads follow each other in memory, and memory is fast only in order.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/formats.h"
#include "attention/kernel.h"
#include "attention/kv_store.h"
#include "attention/scratch.h"
#include "simd/math.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

inline void clear(const PartialSoftmax& p, int num_rows) {
  for (int r = 0; r < num_rows; ++r) {
    p.max[r] = -INFINITY;
    p.sum[r] = 0.0f;
  }
  memset(p.values, 0, sizeof(float) * num_rows * p.num_slots);
}

// Partials of `num_rows` rows in `floats`, which has partial_floats floats.
inline int64_t partial_floats(int num_rows, int num_slots) {
  return num_rows * (2 + static_cast<int64_t>(num_slots));
}
inline PartialSoftmax partial_at(float* floats, int num_rows, int num_slots) {
  return {floats, floats + num_rows, floats + 2 * num_rows, num_slots};
}
inline int64_t unit_floats(const AttentionWork& w) {
  return partial_floats(w.cut_rows, w.num_slots);
}

// Merges a chunk's row into the row's. A chunk that saw no key changes nothing, the first one is
// taken as it is.
inline void merge(const PartialSoftmax& into, const PartialSoftmax& from, int r) {
  if (from.sum[r] == 0.0f) return;
  const float top = from.max[r] > into.max[r] ? from.max[r] : into.max[r];
  const float keep = exp2_nonpositive(into.max[r] - top);
  const float take = exp2_nonpositive(from.max[r] - top);
  into.sum[r] = into.sum[r] * keep + from.sum[r] * take;
  into.max[r] = top;
  float* x = into.row(r);
  for (int d = 0; d < into.num_slots; d += kLanes)
    store_f(x + d,
            mul_add_f(load_f(from.row(r) + d), set_f(take), mul_f(load_f(x + d), set_f(keep))));
}

// The units of item i, and the item of a unit.
inline int first_unit(const AttentionWork& w, int i) { return w.offset[w.num_items - 1 - i]; }
inline int num_units(const AttentionWork& w, int i) {
  return w.offset ? w.offset[w.num_items - i] - first_unit(w, i) : 1;
}
inline int item_of(const AttentionWork& w, int unit) {
  if (!w.offset) return w.num_items - 1 - unit;
  int low = 0, high = w.num_items;  // offset[low] <= unit < offset[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (w.offset[middle] <= unit ? low : high) = middle;
  }
  return w.num_items - 1 - low;
}

// A thread's memory. S: the variant's Scratch.
template <class S>
struct Workspace {
  S scratch;
  alignas(64) float floats[2 * kMaxRows * (2 + kMaxHeadDim)];
};

// Item i; meanwhile the start of item i - 1, which comes next, is prefetched.
template <class F, class S>
void attend_item(const AttentionWork& w, int i, Workspace<S>& workspace) {
  const AttentionItem& item = w.items[i];
  const typename F::TileScope tile_scope(item.num_rows);
  Kernel<F, S> kernel = {w.args, workspace.scratch, item};
  const int rows = item.all_rows();
  const PartialSoftmax all = partial_at(workspace.floats, rows, w.num_slots);
  const PartialSoftmax part =
      partial_at(workspace.floats + partial_floats(rows, w.num_slots), rows, w.num_slots);
  kernel.pack_queries();
  workspace.scratch.next_item = i > 0 ? w.items + i - 1 : nullptr;
  workspace.scratch.next_row = 0;
  clear(all, item.all_rows());
  int c = first_chunk(w.args, item);
  kernel.attend_chunk(c, all);  // the first is taken as it is
  while (++c < end_chunk(w.args, item)) {
    clear(part, item.all_rows());
    kernel.attend_chunk(c, part);
    for (int r = 0; r < item.all_rows(); ++r) merge(all, part, r);
  }
  for (int r = 0; r < item.all_rows(); ++r) kernel.write_row(r, all.row(r), all.max[r], all.sum[r]);
}

// A unit that is a chunk of item i.
template <class F, class S>
void attend_one_chunk(const AttentionWork& w, int i, int unit, Workspace<S>& workspace) {
  const typename F::TileScope tile_scope(w.items[i].num_rows);
  Kernel<F, S> kernel = {w.args, workspace.scratch, w.items[i]};
  kernel.pack_queries();
  workspace.scratch.next_item = nullptr;
  const PartialSoftmax p = partial_at(w.floats + unit * unit_floats(w), w.cut_rows, w.num_slots);
  clear(p, w.items[i].all_rows());
  kernel.attend_chunk(first_chunk(w.args, w.items[i]) + unit - first_unit(w, i), p);
}

template <class F, class S>
void attend_unit(const AttentionWork& w, int i, int unit, Workspace<S>& workspace) {
  if (num_units(w, i) > 1) return attend_one_chunk<F>(w, i, unit, workspace);
  attend_item<F>(w, i, workspace);
}

template <class F, class S>
void merge_chunks(const AttentionWork& w, int i, Workspace<S>& workspace) {
  const Kernel<F, S> kernel = {w.args, workspace.scratch, w.items[i]};
  const auto chunk = [&](int64_t unit) {
    return partial_at(w.floats + unit * unit_floats(w), w.cut_rows, w.num_slots);
  };
  const int first = first_unit(w, i), end = first + num_units(w, i);
  const PartialSoftmax all = chunk(first);
  for (int r = 0; r < w.items[i].all_rows(); ++r) {
    for (int unit = first + 1; unit < end; ++unit) merge(all, chunk(unit), r);
    kernel.write_row(r, all.row(r), all.max[r], all.sum[r]);
  }
}

// Rows of a run that meet one kv head.
inline int rows_of_run(const AttentionArgs& a, int run) {
  return (a.row_start[run + 1] - a.row_start[run]) * (a.num_heads / a.num_kv_heads);
}

constexpr int kSharedRows = 48;  // an item takes several kv heads as long as it has no more rows

// Rows per item: half as many where threads would find few items.
inline int rows_per_item(const AttentionArgs& a) {
  int64_t items = 0;
  for (int run = 0; run < a.num_runs; ++run)
    items += int64_t{a.num_kv_heads} * ((rows_of_run(a, run) + kMaxRows - 1) / kMaxRows);
  return items < int64_t{8} * a.num_threads ? kMaxRows / 2 : kMaxRows;
}

// Lists items with up to `max_heads` kv heads and `max_rows` rows each; returns how many there are.
// `items` may be null.
inline int list_items(const AttentionArgs& a, int max_heads, int max_rows, AttentionItem* items) {
  int n = 0;
  for (int run = 0; run < a.num_runs; ++run) {
    const int flat_rows = rows_of_run(a, run);
    if (!flat_rows) continue;
    const int fit = kSharedRows / flat_rows, per = fit < 1 ? 1 : fit < max_heads ? fit : max_heads;
    for (int g = 0; g < a.num_kv_heads; g += per) {
      const int heads = a.num_kv_heads - g < per ? a.num_kv_heads - g : per;
      for (int first = 0; first < flat_rows; first += max_rows) {
        const int rows = flat_rows - first < max_rows ? flat_rows - first : max_rows;
        if (items) items[n] = {run, g, heads, first, rows};
        ++n;
      }
    }
  }
  return n;
}

// Keys that an item reads, and its cost: a byte read counts as four multiply-adds.
inline int keys_of(const AttentionArgs& a, const AttentionItem& item) {
  return position_of(a, item, item.num_rows - 1) - first_key_of(a, item, 0) + 1;
}
inline int64_t macs_of(const AttentionArgs& a, const AttentionItem& item) {
  return keys_of(a, item) * (2 * static_cast<int64_t>(item.all_rows()) * a.head_dim +
                             4 * item.num_kv * row_bytes(a.kind, a.head_dim));
}

// Kv heads per item: all of them, but fewer where threads would find no chunk to work on.
inline int heads_per_item(const AttentionArgs& a) {
  int64_t chunks = 0;
  for (int run = 0; run < a.num_runs; ++run)
    chunks += (a.computed[run] + kChunkKeys - 1) / kChunkKeys + 1;
  int heads = a.num_kv_heads;
  while (heads > 1 && a.num_threads > 1 &&
         chunks * a.num_kv_heads < int64_t{8} * a.num_threads * heads)
    heads = (heads + 1) / 2;
  return heads;
}

inline int slots_of(const AttentionArgs& a) {
  return has_codes(a.kind) ? Int8<false>::num_slots(a.head_dim)
                           : FloatFormat::num_slots(a.head_dim);
}

// One chunk of an item, as partials of its rows.
template <class F, class S>
void attend_partial(const AttentionArgs& a, const ContextPart& part, const AttentionItem& item,
                    int chunk, Workspace<S>& workspace) {
  const typename F::TileScope tile_scope(item.num_rows);
  Kernel<F, S> kernel = {a, workspace.scratch, item};
  const int slots = slots_of(a), group = kernel.group();
  kernel.pack_queries();
  workspace.scratch.next_item = nullptr;
  const PartialSoftmax p = partial_at(workspace.floats, item.all_rows(), slots);
  clear(p, item.all_rows());
  kernel.attend_chunk(chunk, p);
  for (int r = 0; r < item.all_rows(); ++r) {
    const int within = r % item.num_rows, flat = item.first_row + within;
    const int first = first_key_of(a, item, within) / kChunkKeys;
    if (chunk < first || chunk > position_of(a, item, within) / kChunkKeys) continue;
    const int64_t row = a.row_start[item.run] + flat / group;
    const int head = (item.kv_head + r / item.num_rows) * group + flat % group;
    float* to = part.partials + (part.partial_of(row, first, chunk) * a.num_heads + head) *
                                    (static_cast<int64_t>(slots) + 2);
    memcpy(to, p.row(r), sizeof(float) * static_cast<size_t>(slots));
    to[slots] = p.max[r];
    to[slots + 1] = p.sum[r];
  }
}

// A row of `run` from the partials of all ranks, merged in the order of attend_item.
template <class F, class S>
void merge_row(const AttentionArgs& a, const ContextPart* ranks, int run, int row,
               Workspace<S>& workspace) {
  const int group = a.num_heads / a.num_kv_heads, slots = slots_of(a);
  const AttentionItem item = {run, 0, a.num_kv_heads, (row - a.row_start[run]) * group, group};
  const Kernel<F, S> kernel = {a, workspace.scratch, item};
  const int first = first_key_of(a, item, 0) / kChunkKeys;
  const int last = position_of(a, item, 0) / kChunkKeys;
  const PartialSoftmax all = partial_at(workspace.floats, 1, slots);
  for (int head = 0; head < a.num_heads; ++head) {
    for (int chunk = first; chunk <= last; ++chunk) {
      const ContextPart& part = ranks[chunk % ranks[0].num_ranks];
      float* from = part.partials + (part.partial_of(row, first, chunk) * a.num_heads + head) *
                                        (static_cast<int64_t>(slots) + 2);
      const PartialSoftmax one = {from + slots, from + slots + 1, from, slots};
      if (chunk > first) {
        merge(all, one, 0);
        continue;
      }
      memcpy(all.values, from, sizeof(float) * static_cast<size_t>(slots));
      all.max[0] = one.max[0];
      all.sum[0] = one.sum[0];
    }
    kernel.write_row(head, all.row(0), all.max[0], all.sum[0]);
  }
}

// An item is cut into its chunks if it costs more than one of this many parts of a thread's share;
// where items are so few that all threads would wait for the one with an item more, all of them are
// cut.
constexpr int kShareParts = 4, kFewItems = 32;

inline void plan_chunks(const AttentionAllocator& memory, bool cut_all, AttentionWork& w) {
  int* offset = static_cast<int*>(
      memory.allocate(memory.owner, AttentionBuffer::kOffsets, sizeof(int) * (w.num_items + 1)));
  offset[0] = 0;
  for (int at = 0; at < w.num_items; ++at) {
    const AttentionItem& item = w.items[w.num_items - 1 - at];
    int units = end_chunk(w.args, item) - first_chunk(w.args, item);
    const bool is_small = macs_of(w.args, item) * kShareParts * w.args.num_threads <= w.macs;
    if (units > 1 && !cut_all && is_small) units = 1;
    if (units > 1 && item.all_rows() > w.cut_rows) w.cut_rows = item.all_rows();
    offset[at + 1] = offset[at] + units;
  }
  if (!w.cut_rows) return;  // no item has two chunks
  w.offset = offset;
  w.num_units = offset[w.num_items];
  w.num_merges = w.num_items;
  w.num_floats = w.num_units * unit_floats(w);
  w.floats = static_cast<float*>(
      memory.allocate(memory.owner, AttentionBuffer::kPartials, sizeof(float) * w.num_floats));
}

// AttentionOps::plan.
inline void plan(const AttentionArgs& a, const AttentionAllocator& memory, AttentionWork& w) {
  const int heads = heads_per_item(a), rows = rows_per_item(a);
  const int num_items = list_items(a, heads, rows, nullptr);
  AttentionItem* items = static_cast<AttentionItem*>(memory.allocate(
      memory.owner, AttentionBuffer::kItems, sizeof(AttentionItem) * (num_items + 1)));
  list_items(a, heads, rows, items);
  w = {a, items, nullptr, nullptr, 0, num_items, num_items, 0, 0, slots_of(a), 0};
  for (int i = 0; i < num_items; ++i) w.macs += macs_of(a, items[i]);
  if (a.num_threads > 1) plan_chunks(memory, num_items % a.num_threads && num_items < kFewItems, w);
}

// Memory that a thread keeps from step to step: fresh pages cost more than a small step.
struct KeptMemory {
  void* at = nullptr;
  int64_t bytes = 0;
  ~KeptMemory() { free(at); }
  void* reserve(int64_t count) {
    const int64_t wanted = (count + 63) / 64 * 64;
    if (wanted > bytes) {
      free(at);
      at = aligned_alloc(64, static_cast<size_t>(wanted));
      bytes = wanted;
    }
    return at;
  }
};

// A thread's workspace, and the buffers that the calling thread shares with the others.
struct ThreadMemory {
  KeptMemory workspace, buffers[3];
  static void* allocate(void* owner, AttentionBuffer buffer, int64_t bytes) {
    return static_cast<ThreadMemory*>(owner)->buffers[static_cast<int>(buffer)].reserve(bytes);
  }
};

inline ThreadMemory& thread_memory() {
  static thread_local ThreadMemory memory;
  return memory;
}

// Waking a thread costs tens of microseconds: one for this many multiply-adds.
constexpr int kMacsPerThread = 1 << 21;

inline int threads_for(int64_t macs, int most) {
  const int64_t worthwhile = 1 + macs / kMacsPerThread;
  return static_cast<int>(worthwhile < most ? worthwhile : most);
}

}  // namespace
}  // namespace ridgeline
