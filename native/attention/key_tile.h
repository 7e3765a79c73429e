// Where the keys and values of one tile are in the cache, and what to prefetch of the next one.
#pragma once
#include <stdint.h>
#include <string.h>

#include "attention/attention.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr int kPanelKeys = 2 * kLanes;  // keys whose scores are two vectors
constexpr int kLineBytes = 64;
constexpr int kNearKeys =
    8;  // float formats: keys from the one that is read to the one prefetched to L1

// Lines that are needed soon are prefetched in two steps: from memory into L2, which can wait for
// many lines at once (prefetching into L1 gave two cores 19 GB/s of the 32 that memory has), and
// from there into L1.
inline void prefetch_to_l2(const char* line) { __builtin_prefetch(line, 0, 2); }
inline void prefetch_to_l1(const char* line) { __builtin_prefetch(line, 0, 3); }

inline int round_up_to(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The `count` bytes at p in a buffer that is readable up to N, zeros behind them: ends of rows.
template <int N>
struct PaddedCopy {
  alignas(64) char bytes[N] = {};
  PaddedCopy(const char* p, int count) {
    memcpy(bytes, p, static_cast<size_t>(count < N ? count : N));
  }
};

// Where the int8 codes and scales of a tile are, of one kv head: words of kLanes keys (the next
// four dimensions of them are `stride` bytes further), quads of four values, one per dimension, and
// the scales of kLanes keys.
struct Int8Places {
  const char* words[kTileKeys / kLanes];
  const char* quads[kTileKeys / 4];
  const char *key_scales[kTileKeys / kLanes], *value_scales[kTileKeys / kLanes];
  int64_t stride;
};

// What to prefetch while int8 codes are multiplied, as much per step as a step reads: the start of
// the bytes of every kPrefetchKeys keys.
constexpr int kPrefetchKeys = 16;  // four dimensions of 16 int8 keys are a line
constexpr int kPrefetchesPerWord =
    kPanelKeys / kPrefetchKeys < 1 ? 1 : kPanelKeys / kPrefetchKeys;  // of a panel
struct PrefetchPlaces {
  const char *keys[kTileKeys / kPrefetchKeys], *values[kTileKeys / kPrefetchKeys];
};

// Places of one kv head, given those of an item's first one: `shift` bytes further.
template <class Places>
struct OfHead {
  const Places* at;
  int64_t shift;
};

// What a tile takes of one block: keys first .. first + count - 1 of the tile are the block's from
// `within` on. `data` is the block of the item's first kv head; other heads are stride_head bytes
// further, values `to_values` bytes from their keys. `offset` and `bytes`: what is read of it.
struct BlockSpan {
  const char* data;
  int first, count, within, offset, bytes;
};

struct KeyTile {
  BlockSpan spans[kTileKeys];
  int num_keys, num_spans;
  bool is_in_place;   // int8 of few rows: codes and scales are read where they are in the cache,
  Int8Places places;  // which is here
  PrefetchPlaces prefetch;  // int8 of few rows
};

struct KeyRange {
  int first_key, num_keys;
};

// Lines to prefetch, a few at a time between other work: all at once, they would wait for each
// other, and the work for them. All keys come first, then all values.
struct PrefetchQueue {
  const KeyTile* tile;
  int64_t shift, to_values;  // to the kv head; from keys to values
  int span, lines_per_call;
  const char *at, *end;

  bool next_span() {
    const int num = tile->num_spans;
    if (span == 2 * num) return false;
    const bool is_values = span >= num;
    const BlockSpan& next = tile->spans[is_values ? span - num : span];
    const char* from = next.data + next.offset + shift + (is_values ? to_values : 0);
    at = from - (reinterpret_cast<uintptr_t>(from) & 63);
    end = from + next.bytes;
    ++span;
    return true;
  }
  void issue() { issue(lines_per_call); }
  void issue(int num_lines) {
    for (int n = num_lines; n > 0;) {
      if (at >= end && !next_span()) return;
      const char* line = at;
      for (; n > 0 && line < end; --n, line += 64) __builtin_prefetch(line, 0, 2);  // to L2
      at = line;
    }
  }
};

}  // namespace
}  // namespace ridgeline
