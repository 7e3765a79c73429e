// What the engines of all instruction sets share. An engine says how one kind of weight is decoded
// and multiplied; linear/panels.h walks through the panels with it.
//
// An engine `E` has
//   Vec, Part         vectors of decoded weights, and of sums
//   kLines            lines per block, and kStepsPerLine steps per line: a step uses 4 bytes of a
//   row decode            one line into vectors, dot: sums + products of one step kRows, kPanels
//   the register tile for many rows clear, finish     how partial results begin, and how they
//   become outputs
// and the constants of its `Variant` (VariantDefaults). Engines for each instruction set are in
// engines_portable.h, engines_avx2.h and engines_avx512.h.
#pragma once
#include "linear/linear.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

constexpr int kMaxPanels = kLanes == 16 ? 2 : 1;  // panels of a register tile, over all engines
constexpr int kVecs = kPanel / kLanes;            // vectors per panel

// What variants may change. Up to kDirectMaxRows rows, lines are decoded in registers, in tiles of
// kDirectRows rows; the same with kStoredMaxRows and kStoredRows for lines that need no decoding.
struct VariantDefaults {
  static constexpr int kMaxBlock = kBlock;       // see LinearOps
  static constexpr int64_t kCachedRowBytes = 0;  // see LinearOps
  static constexpr int kBlockRows = 96;          // see LinearOps
  // Results of more rows bypass the caches: a line that is written whole need not be read. 0:
  // never.
  static constexpr int kStreamMinRows = 0;
};

template <class V>
inline bool streams_results(const LinearArgs& a) {
  return V::kStreamMinRows > 0 && a.num_rows > V::kStreamMinRows && !a.read_soon;
}

template <class V>
struct EngineDefaults {
  using Variant = V;
  static constexpr int kPanels = kMaxPanels;

  // With each line that is used, one further on is prefetched: the CPU's own prefetcher stops at
  // the end of a page, and the core would then wait for memory.
  static constexpr int kPrefetchLines = 32;  // this many lines ahead,
  static constexpr int kPrefetchLevel =
      3;  // into this cache, as __builtin_prefetch counts: 3 is L1
  static constexpr int kPrefetchLinesManyRows = kPrefetchLines;  // in tiles of more than four rows
  // A second prefetch into L1, this many lines ahead, in tiles of at least this many rows; 0: none.
  static constexpr int kNearPrefetchLines = 0, kNearPrefetchMinRows = 0;

  static constexpr bool kRowsFromMemory =
      false;  // whether dot_memory takes a row's bytes in memory
  static constexpr bool kWidensPerBlock = false;  // whether sums of 16 bits are widened per block
};

// Partial results in floats that start at zero: all engines but int8.
struct FloatPartials {
  template <int P>
  static void clear(const LinearArgs&, int, float* partial) {
    for (int i = 0; i < P * kPanel; i += kLanes) store_f(partial + i, set_f(0.0f));
  }
};

// Partial results of groups are scaled floats; only the factor per output is left to apply.
struct GroupPartials : FloatPartials {
  using Elem = int32_t;
  static Vf finish(const LinearArgs& a, const float* partial, int out, int) {
    return mul_f(load_f(partial), load_f(a.weight.factors + out));
  }
};

struct Int4Layout : GroupPartials {
  static constexpr int kLines = 4, kStepsPerLine = 2, kBlockInputs = kBlock, kMiddle = 8;
  static constexpr bool kHasZeros = true;
  static constexpr bool kScaledGroups = true, kNeedsNoDecoding = false;
};

struct Bf16Layout : FloatPartials {
  using Elem = float;
  static constexpr int kLines = 16, kStepsPerLine = 2, kBlockInputs = kBlock;
  static constexpr bool kScaledGroups = false, kNeedsNoDecoding = false;
  static Vf finish(const LinearArgs&, const float* partial, int, int) { return load_f(partial); }
};

struct Fp32Layout : FloatPartials {
  using Elem = float;
  static constexpr int kLines = 32, kStepsPerLine = 1, kBlockInputs = kBlock;
  static constexpr bool kScaledGroups = false, kNeedsNoDecoding = true;
  static Vf finish(const LinearArgs&, const float* partial, int, int) { return load_f(partial); }
};

// Partial results in int32, started so that weights decoded as q + kOffset come out as q.
template <int kOffset>
struct Int8Layout {
  using Elem = int32_t;
  static constexpr int kLines = 8, kBlockInputs = kBlock, kMiddle = kOffset;
  static constexpr bool kScaledGroups = false, kNeedsNoDecoding = false;
  template <int P>
  static void clear(const LinearArgs& a, int row, float* partial) {
    const Vi start = set_i(-kOffset * a.sums[row]);
    for (int i = 0; i < P * kPanel; i += kLanes)
      store_i(reinterpret_cast<int32_t*>(partial) + i, start);
  }
  static Vf scale(const LinearArgs& a, Vi sum, int out, int row) {
    return mul_f(to_f(sum), mul_f(load_f(a.weight.factors + out), set_f(a.scales[row])));
  }
  static Vf finish(const LinearArgs& a, const float* partial, int out, int row) {
    return scale(a, load_i(reinterpret_cast<const int32_t*>(partial)), out, row);
  }
};

// The lines and products of an int8 engine, in blocks of B inputs, with scales per group.
template <class Int8, int B>
struct GroupedInt8 : Int8 {
  static constexpr int kLines = B / 4, kBlockInputs = B;
  static constexpr bool kScaledGroups = true, kHasZeros = false;
  template <int P>
  static void clear(const LinearArgs& a, int row, float* partial) {
    GroupPartials::clear<P>(a, row, partial);
  }
  static Vf finish(const LinearArgs& a, const float* partial, int out, int row) {
    return GroupPartials::finish(a, partial, out, row);
  }
};

// An engine in blocks of B inputs instead of 32.
template <class E, int B>
struct WithBlocksOf : E {
  static constexpr int kLines = E::kLines * B / kBlock, kBlockInputs = B;
};

// Steps per block.
template <class E>
constexpr int steps() {
  return E::kLines * E::kStepsPerLine;
}

}  // namespace
}  // namespace ridgeline
