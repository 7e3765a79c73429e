// The attention kernel of a cache in INT4. A chunk of kChunkKeys keys is taken at once: the scores
// of all its groups, one softmax, the weighted values of all groups. A few query rows of one kv
// head share the loads and the unpacking of codes.
//
// Both products run on integers. With a key's range in the query,
//
//   q . k[t] = sum over d of (q[d] * scale[d]) * code[t, d]  +  q . min
//
// so q * scale is rounded to 16 bits for each group, relative to the largest query times the
// group's largest scale; q . min is a sum of floats. Weights times the scales of their tokens
// likewise, 32 channels at a time; their sums with mins are kept apart, a vector for every 32
// channels, which is added up at the end.
//
// The order of sums is that of attention.h: rows share loads, never sums; what a row sees of a
// group depends on its position alone.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/int4/int4.h"
#include "attention/kernel.h"
#include "attention/scratch.h"
#include "attention/work.h"
#include "simd/compiler.h"
#include "simd/math.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr int kInt4Rows = kInt8Rows;                   // rows that share loads
constexpr int kChunkGroups = kChunkKeys / kInt4Group;  // groups of a chunk
constexpr int kInt4Panels = kInt4Group / kPanelKeys;   // pairs of vectors in a group
constexpr int kInt4Words = kMaxHeadDim / 2;            // pairs of a row's dimensions
constexpr int kInt4Slots = kMaxHeadDim + kMaxHeadDim / kInt4Group * kLanes;

// Sums of a row: D weighted values, then for every 32 channels the lanes of its sum over mins.
inline int int4_slots(int D) { return D + D / kInt4Group * kLanes; }

// The largest of `count` float16 numbers that are not negative.
inline float largest_f16(const char* p, int count) {
  Vf top = set_f(0.0f);
  for (int i = 0; i < count; i += kLanes) top = max_f(top, load_f16(p + 2 * i));
  return reduce_max(top);
}

// Codes i of every word, as pairs of 16 bits: those of 2 * kPair and 2 * kPair + 1.
template <int kPair>
inline Vi int4_pair(Vi words) {
  if constexpr (kPair > 0) words = shift_right_signed<4 * kPair>(words);
  return and_i(words, set_i(0x000F000F));
}

struct Int4Scratch {
  alignas(64) float query[kInt4Rows][kMaxHeadDim];       // times the scale, in units of scores
  alignas(64) float unit_query[kInt4Rows][kMaxHeadDim];  // over its largest number
  alignas(64) int32_t words[kInt4Rows][kInt4Words];      // the factors of codes, pairs of 16 bits
  alignas(64) float scores[kInt4Rows][kChunkKeys];       // then weights
  alignas(64) float recent_weights[kInt4Rows][kInt4Group];
  alignas(64) float floats[2 * kInt4Rows * (2 + kInt4Slots)];
  float largest[kInt4Rows], from_min[kInt4Rows];
};

// The tiles of an item in the order in which they are read, from `chunk` on.
struct Int4Tiles {
  const Int4Groups& groups;
  const int32_t* table;
  int64_t head_offset;
  int group = 0, first = 0, chunk_end = 0, end = 0;  // groups first .. chunk_end - 1 of a chunk
  bool is_values = false;

  void start(int first_group, int end_group) {
    group = first = first_group;
    end = end_group;
    is_values = false;
    end_chunk();
  }
  void end_chunk() {
    const int full = (first / kChunkGroups + 1) * kChunkGroups;
    chunk_end = full < end ? full : end;
  }
  // The next tile; `last` when there is none.
  const char* next(const char* last) {
    if (group >= chunk_end) {
      if (is_values) first = chunk_end;
      is_values = !is_values;
      group = first;
      end_chunk();
      if (group >= end) return last;
    }
    return (is_values ? groups.v : groups.k) + table[group++] * groups.stride_block + head_offset;
  }
};

template <bool kVnni>
struct Int4Kernel {
  const AttentionArgs& a;  // of the recent rows
  const Int4Groups& coded;
  Int4Scratch& s;
  const AttentionItem& item;
  Int4Tiles ahead;            // from the tile that is prefetched on
  const char* far = nullptr;  // the tile to prefetch while one is read

  Int4Kernel(const AttentionArgs& args, const Int4Groups& groups, Int4Scratch& scratch,
             const AttentionItem& of)
      : a(args),
        coded(groups),
        s(scratch),
        item(of),
        ahead{groups, groups.table + groups.table_start[of.run], of.kv_head * groups.stride_head} {}

  int group_size() const { return a.num_heads / a.num_kv_heads; }
  int64_t head_of(int r) const {  // flat index of the row's query head among those of the step
    const int flat = item.first_row + r;
    const int64_t row = a.row_start[item.run] + flat / group_size();
    return row * a.num_heads + item.kv_head * group_size() + flat % group_size();
  }
  const char* tile(KvSide side, int group) const {
    return (side == KvSide::kKeys ? coded.k : coded.v) +
           coded.table[coded.table_start[item.run] + group] * coded.stride_block +
           item.kv_head * coded.stride_head;
  }
  const char* recent_tile(KvSide side, int group) const {
    return (side == KvSide::kKeys ? a.k : a.v) +
           a.table[a.table_start[item.run] + group] * a.stride_block + item.kv_head * a.stride_head;
  }

  void load_queries() {
    const float unit = a.softcap > 0 ? a.scale : a.scale * kLog2E;
    for (int r = 0; r < item.num_rows; ++r) {
      const int64_t flat = head_of(r);
      const float* q =
          a.q + flat / a.num_heads * a.q_stride_row + flat % a.num_heads * a.q_stride_head;
      Vf top = set_f(0.0f);
      for (int d = 0; d < a.head_dim; d += kLanes) {
        const Vf x = mul_f(load_f(q + d), set_f(unit));
        store_f(s.query[r] + d, x);
        top = max_f(top, abs_f(x));
      }
      s.largest[r] = reduce_max(top);
      const Vf inverse = set_f(s.largest[r] > 1e-30f ? 1.0f / s.largest[r] : 0.0f);
      for (int d = 0; d < a.head_dim; d += kLanes)
        store_f(s.unit_query[r] + d, mul_f(load_f(s.query[r] + d), inverse));
    }
  }

  // acc[row] += codes of the words at `at` and one vector further, times the rows' pairs from
  // `pair` on.
  template <int R>
  void multiply_words(Vi (&acc)[R][2], const char* at, int pair) const {
    const Vi low = load_i(at), high = load_i(at + 4 * kLanes);
    multiply_pair<0, R>(acc, low, high, pair);
    multiply_pair<1, R>(acc, low, high, pair);
    multiply_pair<2, R>(acc, low, high, pair);
    multiply_pair<3, R>(acc, low, high, pair);
  }
  template <int kPair, int R>
  void multiply_pair(Vi (&acc)[R][2], Vi low, Vi high, int pair) const {
    const Vi x = int4_pair<kPair>(low), y = int4_pair<kPair>(high);
    RL_UNROLL for (int r = 0; r < R; ++r) {
      const Vi by = set_i(s.words[r][pair + kPair]);
      acc[r][0] = dot_i16<kVnni>(acc[r][0], x, by);
      acc[r][1] = dot_i16<kVnni>(acc[r][1], y, by);
    }
  }

  // Queries times the scales of a group, in 16 bits; and their products with its mins.
  template <int R>
  void scale_queries(const char* ranges, float inverse) {
    const int D = a.head_dim;
    Vf from_min[R];
    RL_UNROLL for (int r = 0; r < R; ++r) from_min[r] = set_f(0.0f);
    for (int d = 0; d < D; d += kPanelKeys) {
      Vf scale[2], least[2];
      RL_UNROLL for (int i = 0; i < 2; ++i) {
        scale[i] = mul_f(load_f16(ranges + 2 * (d + i * kLanes)), set_f(inverse));
        least[i] = load_f16(ranges + 2 * (D + d + i * kLanes));
      }
      RL_UNROLL for (int r = 0; r < R; ++r) {
        Vi code[2];
        RL_UNROLL for (int i = 0; i < 2; ++i) {
          const int at = d + i * kLanes;
          code[i] = to_i(mul_f(load_f(s.unit_query[r] + at), scale[i]));
          from_min[r] = mul_add_f(load_f(s.query[r] + at), least[i], from_min[r]);
        }
        store_i16(s.words[r] + d / 2, code[0], code[1]);
      }
    }
    RL_UNROLL for (int r = 0; r < R; ++r) s.from_min[r] = reduce_add(from_min[r]);
  }

  // Scores of a group's keys, to column `to`.
  template <int R>
  RL_NOINLINE void score_group(int group, int to) {
    const int D = a.head_dim;
    const char* keys = tile(KvSide::kKeys, group);
    const char* ranges = keys + kInt4Group * D / 2;
    const float top = largest_f16(ranges, D);
    far = ahead.next(far);
    scale_queries<R>(ranges, top > 0 ? kMaxWord / top : 0.0f);
    for (int panel = 0; panel < kInt4Panels; ++panel) {
      Vi acc[R][2];
      RL_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set_i(0);
      const char* at = keys + 4 * panel * kPanelKeys;
      for (int d = 0; d < D; d += 8, at += 4 * kInt4Group) {
        multiply_words<R>(acc, at, d / 2);
        if (panel == 0) prefetch_step(d / 8);
      }
      RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i) {
        const Vf by = set_f(s.largest[r] * (top / kMaxWord));
        store_f(s.scores[r] + to + panel * kPanelKeys + i * kLanes,
                mul_add_f(to_f(acc[r][i]), by, set_f(s.from_min[r])));
      }
    }
  }

  // Scores of the row's own group, in INT8; those of keys behind the row mean nothing.
  void score_recent(int r, int group, float* to) const {
    const char* keys = recent_tile(KvSide::kKeys, group);
    const char* scales = keys + static_cast<int64_t>(a.head_dim) * kInt4Group;
    for (int key = 0; key < kInt4Group; key += kLanes) {
      Vf acc = set_f(0.0f);
      for (int d = 0; d < a.head_dim; d += 4) {
        const Vi words = load_i(keys + d * kInt4Group + 4 * key);
        const float* q = s.query[r] + d;
        acc = mul_add_f(set_f(q[0]), number<0>(words), acc);
        acc = mul_add_f(set_f(q[1]), number<1>(words), acc);
        acc = mul_add_f(set_f(q[2]), number<2>(words), acc);
        acc = mul_add_f(set_f(q[3]), number<3>(words), acc);
      }
      store_f(to + key, mul_f(acc, load_f(reinterpret_cast<const float*>(scales) + key)));
    }
  }
  template <int kByte>
  static Vf number(Vi codes) {  // of a byte that is a code plus 128
    return to_f(add_i(and_i(shift_right_signed<8 * kByte>(codes), set_i(255)), set_i(-128)));
  }

  // Soft-caps the scores of `num_keys` keys from position `first` on, hides those that the row does
  // not see and turns them into weights; returns (largest score, sum).
  void soften(int r, int first, int num_keys, float& max, float& sum) {
    float* scores = s.scores[r];
    if (a.softcap > 0) {
      const Vf cap = set_f(a.softcap * kLog2E), inverse = set_f(1.0f / a.softcap);
      for (int j = 0; j < num_keys; j += kLanes)
        store_f(scores + j, mul_f(cap, tanh_f(mul_f(load_f(scores + j), inverse))));
    }
    const int low = first_key_of(a, item, r) - first, end = position_of(a, item, r) + 1 - first;
    for (int j = 0; j < low && j < num_keys; ++j) scores[j] = -INFINITY;
    for (int j = end > 0 ? end : 0; j < num_keys; ++j) scores[j] = -INFINITY;
    Vf top = set_f(-INFINITY), total = set_f(0.0f);
    for (int j = 0; j < num_keys; j += kLanes) top = max_f(top, load_f(scores + j));
    max = reduce_max(top);
    const Vf zero = set_f(max);
    for (int j = 0; j < num_keys; j += kLanes) {
      const Vf weight = exp2_nonpositive(sub_f(load_f(scores + j), zero));
      total = add_f(total, weight);
      store_f(scores + j, weight);
    }
    sum = reduce_add(total);
  }

  // The rows' weights times the scales of 32 channels, in 16 bits; their products with the mins are
  // added to the sums of these channels.
  template <int R>
  void scale_weights(const char* scales, const char* mins, float inverse, int from, int slot,
                     float* const* values) {
    Vf total[R];
    RL_UNROLL for (int r = 0; r < R; ++r) total[r] = load_f(values[r] + slot);
    for (int t = 0; t < kInt4Group; t += kPanelKeys) {
      Vf scale[2], least[2];
      RL_UNROLL for (int i = 0; i < 2; ++i) {
        scale[i] = mul_f(load_f16(scales + 2 * (t + i * kLanes)), set_f(inverse));
        least[i] = load_f16(mins + 2 * (t + i * kLanes));
      }
      RL_UNROLL for (int r = 0; r < R; ++r) {
        Vi code[2];
        RL_UNROLL for (int i = 0; i < 2; ++i) {
          const Vf weight = load_f(s.scores[r] + from + t + i * kLanes);
          code[i] = to_i(mul_f(weight, scale[i]));
          total[r] = mul_add_f(weight, least[i], total[r]);
        }
        store_i16(s.words[r] + t / 2, code[0], code[1]);
      }
    }
    RL_UNROLL for (int r = 0; r < R; ++r) store_f(values[r] + slot, total[r]);
  }

  // Adds the weighted values of a group, whose weights are in column `from`.
  template <int R>
  RL_NOINLINE void add_group(int group, int from, float* const* values) {
    const int D = a.head_dim, num_chunks = D / kInt4Group;
    const char* tiles = tile(KvSide::kValues, group);
    const char* scales = tiles + kInt4Group * D / 2;
    const char* mins = scales + 2 * D;
    far = ahead.next(far);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const char* own = scales + 2 * kInt4Group * chunk;
      const float top = largest_f16(own, kInt4Group);
      scale_weights<R>(own, mins + 2 * kInt4Group * chunk, top > 0 ? kMaxWord / top : 0.0f, from,
                       D + chunk * kLanes, values);
      for (int panel = 0; panel < kInt4Panels; ++panel) {
        const int slot = chunk * kInt4Group + panel * kPanelKeys;
        Vi acc[R][2];
        RL_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set_i(0);
        for (int word = 0; word < kInt4Group / 8; ++word) {
          multiply_words<R>(acc, tiles + 4 * (word * D + slot), 4 * word);
          if (panel == 0) prefetch_step(chunk * (kInt4Group / 8) + word);
        }
        const Vf by = set_f(top / kMaxWord);
        RL_UNROLL for (int r = 0; r < R; ++r) RL_UNROLL for (int i = 0; i < 2; ++i) {
          float* at = values[r] + slot + i * kLanes;
          store_f(at, mul_add_f(to_f(acc[r][i]), by, load_f(at)));
        }
      }
    }
  }

  // Adds the row's own group; a weight of zero hides whatever is stored behind the row.
  void add_recent(int r, int group, float* values) const {
    const char* tiles = recent_tile(KvSide::kValues, group);
    const float* scales =
        reinterpret_cast<const float*>(tiles + static_cast<int64_t>(a.head_dim) * kInt4Group);
    const int last = position_of(a, item, r) % kInt4Group;
    float weight[kInt4Group] = {};
    for (int t = 0; t <= last; ++t) weight[t] = s.recent_weights[r][t] * scales[t];
    for (int slot = 0; slot < a.head_dim; slot += kLanes) {
      Vf acc = load_f(values + slot);
      for (int t = 0; t <= last; t += 4) {
        const Vi words = load_i(tiles + static_cast<int64_t>(t) * a.head_dim + 4 * slot);
        acc = mul_add_f(set_f(weight[t]), number<0>(words), acc);
        acc = mul_add_f(set_f(weight[t + 1]), number<2>(words), acc);
        acc = mul_add_f(set_f(weight[t + 2]), number<1>(words), acc);
        acc = mul_add_f(set_f(weight[t + 3]), number<3>(words), acc);
      }
      store_f(values + slot, acc);
    }
  }

  int own_group(int r) const { return position_of(a, item, r) / kInt4Group; }
  int first_group() const { return first_key_of(a, item, 0) / kInt4Group; }

  // A tile is read in D / 8 steps; each prefetches as much of the tile ahead, 160 bytes.
  void prefetch_step(int step) const {
    const char* at = far + 5 * kInt4Group * step;
    prefetch_to_l2(at);
    prefetch_to_l2(at + kLineBytes);
    prefetch_to_l2(at + 2 * kLineBytes);
  }

  // From now on tiles of chunks `chunk` .. end_of_chunks - 1 are prefetched; the first ones at
  // once.
  void start_prefetch(int chunk, int end_of_chunks) {
    const int first = chunk * kChunkGroups, own = own_group(item.num_rows - 1);
    const int end = end_of_chunks * kChunkGroups;
    ahead.start(first > first_group() ? first : first_group(), end < own ? end : own);
    far = coded.k;  // where there is nothing to prefetch
    const int bytes = static_cast<int>(int4_tile_bytes(a.head_dim));
    for (int n = kPrefetchBytes / bytes; n > 0; --n) {
      const char* next = ahead.next(nullptr);
      if (!next) return;
      far = next;
      for (int step = 0; step < a.head_dim / 8; ++step) prefetch_step(step);
    }
  }

  // One chunk of keys for R rows, into cleared partials.
  template <int R>
  void attend_rows(int chunk, const PartialSoftmax& p) {
    const int begin = chunk * kChunkGroups, last_own = own_group(R - 1);
    const int first = begin > first_group() ? begin : first_group();
    const int end = begin + kChunkGroups < last_own + 1 ? begin + kChunkGroups : last_own + 1;
    const int coded_end = end < last_own ? end : last_own;  // the last row's own group is not coded
    for (int group = first; group < coded_end; ++group)
      score_group<R>(group, (group - first) * kInt4Group);
    float* values[R];
    for (int r = 0; r < R; ++r) {
      values[r] = p.row(r);
      const int own = own_group(r), column = (own - first) * kInt4Group;
      const bool is_here = own >= first && own < end;
      if (is_here) score_recent(r, own, s.scores[r] + column);
      soften(r, first * kInt4Group, (end - first) * kInt4Group, p.max[r], p.sum[r]);
      if (!is_here) continue;
      memcpy(s.recent_weights[r], s.scores[r] + column, sizeof s.recent_weights[r]);
      memset(s.scores[r] + column, 0, sizeof s.recent_weights[r]);
    }
    for (int group = first; group < coded_end; ++group)
      add_group<R>(group, (group - first) * kInt4Group, values);
    for (int r = 0; r < R; ++r)
      if (own_group(r) >= first && own_group(r) < end) add_recent(r, own_group(r), values[r]);
  }
  template <int R>
  void attend_chunk(int chunk, const PartialSoftmax& p) {
    if (item.num_rows == R) return attend_rows<R>(chunk, p);
    if constexpr (R > 1) attend_chunk<R - 1>(chunk, p);
  }

  void write_row(int r, const PartialSoftmax& p) const {
    const int64_t flat = head_of(r);
    const float* values = p.row(r);
    float sum = p.sum[r], *out = a.out + flat * a.head_dim;
    if (a.sinks) sum += exp2f(a.sinks[flat % a.num_heads] * kLog2E - p.max[r]);
    const Vf inverse = set_f(1.0f / sum);
    for (int chunk = 0; chunk < a.head_dim / kInt4Group; ++chunk) {
      const Vf least = set_f(reduce_add(load_f(values + a.head_dim + chunk * kLanes)));
      for (int i = 0; i < kInt4Group; i += kLanes) {
        const int slot = chunk * kInt4Group + i;
        store_f(out + slot, mul_f(add_f(load_f(values + slot), least), inverse));
      }
    }
  }
};

// Divides attention over a cache in INT4 among threads: an item is up to kInt4Rows rows of one run
// and kv head, cut into chunks where items are few (AttentionWork).
template <bool kVnni>
struct Int4Work {
  const Int4Groups& coded;
  AttentionWork work;

  static Int4Scratch& scratch() {
    static thread_local KeptMemory memory;
    return *static_cast<Int4Scratch*>(memory.reserve(sizeof(Int4Scratch)));
  }

  void run_unit(int unit) const {
    const int i = item_of(work, unit);
    const AttentionItem& item = work.items[i];
    Int4Kernel<kVnni> kernel(work.args, coded, scratch(), item);
    kernel.load_queries();
    const int first = first_chunk(work.args, item), end = end_chunk(work.args, item);
    if (num_units(work, i) > 1) {
      const int chunk = first + unit - first_unit(work, i);
      const PartialSoftmax p =
          partial_at(work.floats + unit * unit_floats(work), work.cut_rows, work.num_slots);
      clear(p, item.num_rows);
      kernel.start_prefetch(chunk, chunk + 1);
      return kernel.template attend_chunk<kInt4Rows>(chunk, p);
    }
    const PartialSoftmax all = partial_at(kernel.s.floats, item.num_rows, work.num_slots);
    const PartialSoftmax part =
        partial_at(kernel.s.floats + partial_floats(item.num_rows, work.num_slots), item.num_rows,
                   work.num_slots);
    kernel.start_prefetch(first, end);
    clear(all, item.num_rows);
    kernel.template attend_chunk<kInt4Rows>(first, all);  // the first is taken as it is
    for (int chunk = first + 1; chunk < end; ++chunk) {
      clear(part, item.num_rows);
      kernel.template attend_chunk<kInt4Rows>(chunk, part);
      for (int r = 0; r < item.num_rows; ++r) merge(all, part, r);
    }
    for (int r = 0; r < item.num_rows; ++r) kernel.write_row(r, all);
  }

  void merge_item(int i) const {
    if (num_units(work, i) == 1) return;
    const Int4Kernel<kVnni> kernel(work.args, coded, scratch(), work.items[i]);
    const auto chunk = [&](int64_t unit) {
      return partial_at(work.floats + unit * unit_floats(work), work.cut_rows, work.num_slots);
    };
    const int first = first_unit(work, i), end = first + num_units(work, i);
    const PartialSoftmax all = chunk(first);
    for (int r = 0; r < work.items[i].num_rows; ++r) {
      for (int unit = first + 1; unit < end; ++unit) merge(all, chunk(unit), r);
      kernel.write_row(r, all);
    }
  }

  // AttentionOps::attend_int4.
  static void attend(const AttentionArgs& a, const Int4Groups& coded) {
    ThreadMemory& shared = thread_memory();
    const int num_items = list_items(a, 1, kInt4Rows, nullptr);
    AttentionItem* items = static_cast<AttentionItem*>(ThreadMemory::allocate(
        &shared, AttentionBuffer::kItems, int64_t{sizeof(AttentionItem)} * (num_items + 1)));
    list_items(a, 1, kInt4Rows, items);
    Int4Work all = {
        coded,
        {a, items, nullptr, nullptr, 0, num_items, num_items, 0, 0, int4_slots(a.head_dim), 0}};
    for (int i = 0; i < num_items; ++i) all.work.macs += macs_of(a, items[i]);
    if (a.num_threads > 1)
      plan_chunks({&shared, ThreadMemory::allocate},
                  num_items % a.num_threads && num_items < kFewItems, all.work);
    const int threads = threads_for(all.work.macs, a.num_threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < all.work.num_units; ++i) all.run_unit(i);
#pragma omp for schedule(static)
      for (int i = 0; i < all.work.num_merges; ++i) all.merge_item(i);
    }
  }
};

}  // namespace
}  // namespace ridgeline
