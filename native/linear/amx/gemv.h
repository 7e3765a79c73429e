// One or two rows of int4 or int8, by vectors, on a core with AMX.
//
// So few rows only wait for memory, so nothing may keep the core from requesting it: prefetches are
// spaced in time (simd/prefetch.h), and what a line is multiplied by comes from registers, since
// each load from memory takes one of the places of loads that wait for lines. The numbers and their
// order are those of all other kernels, so the bits are the same.
#pragma once
#include "linear/amx/tiles.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "simd/avx512.h"
#include "simd/compiler.h"
#include "simd/prefetch.h"

namespace ridgeline {
namespace {

constexpr int kGemvMaxRows = 2;  // with more, broadcasting rows takes longer than reading weights
constexpr int kGemvMinPacedInputs =
    1024;  // smaller models are in L2, where spacing only slows reads
constexpr int kGemvDelay = 3;
constexpr int kGemvScalePrefetch = 256;  // scales are prefetched this many numbers ahead
template <class E>
constexpr int64_t kGemvPrefetchBytes = (E::kScaledGroups ? 96 : 160) * kLineBytes;

// Sixteen inputs of a row, in every lane of 128 bits ...
RL_INLINE Vi load_16_inputs(const uint8_t* x) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
// ... and four of them, in every lane of 32.
template <int kFour>
RL_INLINE Vi broadcast_four(Vi inputs) {
  return _mm512_shuffle_epi32(inputs, static_cast<_MM_PERM_ENUM>(kFour * 0x55));
}

template <class E, int kRows, bool kPaced>
struct Gemv {
  // Vectors of a line; lines of 16 inputs.
  static constexpr int kPer = E::kStepsPerLine, kLinesOf16 = 4 / kPer;
  const LinearArgs& a;

  // `zero_offset` is zero, but depends on the prefetches before it: see delay.
  template <int kLine = 0>
  RL_INLINE void multiply(int64_t& zero_offset, const uint8_t* line, const Vi (&x)[kRows],
                          Vi (&sum)[kRows][2]) {
    if constexpr (kLine < kLinesOf16) {
      zero_offset = delay<kPaced ? kGemvDelay : 0>(zero_offset);
      __builtin_prefetch(line + kGemvPrefetchBytes<E> + zero_offset, 0, 2);
      Vi w[kPer][1];
      E::decode(line, w);
      RL_UNROLL for (int r = 0; r < kRows; ++r) {
        Vi& one = sum[r][kLine * kPer % 2];
        one = E::dot(one, w[0][0], broadcast_four<kLine * kPer>(x[r]));
      }
      if constexpr (kPer == 2)
        RL_UNROLL for (int r = 0; r < kRows; ++r) sum[r][1] =
            E::dot(sum[r][1], w[1][0], broadcast_four<kLine * 2 + 1>(x[r]));
      multiply<kLine + 1>(zero_offset, line + kLineBytes, x, sum);
    }
  }

  // A group's zero, per output.
  RL_INLINE Vi zero_of(int64_t at) const {
    if constexpr (E::kScaledGroups) {
      if (a.weight.zeros) return load_u8(a.weight.zeros + at * kPanel);
      if (a.weight.mins) return set_i(0);
    }
    return set_i(E::kMiddle);
  }

  // Scales a group's sums onto the results.
  RL_INLINE void add_group(int panel, int group, int64_t at, const int32_t* row_sums,
                           const float* row_scales, const Vi (&sum)[kRows][2], Vf (&y)[kRows]) {
    const PackedWeight& w = a.weight;
    const Vf scale = group_scale_at(w, w.scales, w.steps, at, panel, group);
    RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] =
        fma_f(to_f(add_i(sum[r][0], sum[r][1])), mul_f(scale, set_f(row_scales[r])), y[r]);
    if (!w.mins) return;
    const Vf min = group_scale_at(w, w.mins, w.min_steps, at, panel, group);
    RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] =
        fma_f(min, set_f(static_cast<float>(row_sums[r]) * row_scales[r]), y[r]);
  }

  void run(int first_panel, int end_panel) {
    const PackedWeight& w = a.weight;
    // Copied from the weight, whose functions would divide with every group.
    const int block = block_of(w.group, Avx512Amx::kMaxBlock), num_groups = w.num_groups();
    const int blocks_of_group = w.group / block;
    const int64_t panel_bytes = w.panel_bytes(), block_bytes = int64_t{a.num_rows} * block;
    alignas(64) float partial[kRows * kPanel];
    int64_t zero_offset = 0;
    for (int panel = first_panel; panel < end_panel; ++panel) {
      const uint8_t* line = w.lines + panel * panel_bytes;
      const uint8_t* x = static_cast<const uint8_t*>(a.x) + int64_t{a.first_row} * block;
      const int32_t* row_sums = a.sums + a.first_row;
      const float* row_scales = a.scales + a.first_row;
      Vf y[kRows];
      RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] = set_f(0.0f);
      int64_t at = int64_t{panel} * num_groups;
      for (int group = 0; group < num_groups;
           ++group, ++at, row_sums += a.num_rows, row_scales += a.num_rows) {
        const Vi zero = zero_of(at);
        Vi sum[kRows][2];
        RL_UNROLL for (int r = 0; r < kRows; ++r) sum[r][0] = mul_i(zero, set_i(-row_sums[r])),
                                                  sum[r][1] = set_i(0);
        if constexpr (E::kScaledGroups) {
          zero_offset = delay<kPaced ? kGemvDelay : 0>(zero_offset);
          __builtin_prefetch(w.scales + at * kPanel + kGemvScalePrefetch + zero_offset, 0, 2);
        }
        for (int b = 0; b < blocks_of_group; ++b, x += block_bytes) {
#pragma GCC unroll 4
          for (int i = 0; i < block; i += 16, line += kLinesOf16 * kLineBytes) {
            Vi inputs[kRows];
            RL_UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = load_16_inputs(x + r * block + i);
            multiply(zero_offset, line, inputs, sum);
          }
        }
        if constexpr (E::kScaledGroups)
          add_group(panel, group, at, row_sums, row_scales, sum, y);
        else  // write_rows scales them
          RL_UNROLL for (int r = 0; r < kRows; ++r) y[r] = as_f(add_i(sum[r][0], sum[r][1]));
      }
      RL_UNROLL for (int r = 0; r < kRows; ++r) store_f(partial + r * kPanel, y[r]);
      write_rows<E, 1>(a, panel, a.first_row, kRows, partial);
    }
  }
};

template <class E, bool kPaced>
void multiply_gemv(const LinearArgs& a, int first_panel, int end_panel) {
  if (a.end_row - a.first_row == 1)
    Gemv<E, 1, kPaced>{a}.run(first_panel, end_panel);
  else
    Gemv<E, kGemvMaxRows, kPaced>{a}.run(first_panel, end_panel);
}

template <class E>
void multiply_gemv(const LinearArgs& a, int first_panel, int end_panel) {
  if (a.weight.num_in >= kGemvMinPacedInputs)
    multiply_gemv<E, true>(a, first_panel, end_panel);
  else
    multiply_gemv<E, false>(a, first_panel, end_panel);
}

// Returns false, having done nothing, where there are too many rows or the weight has another kind.
inline bool try_gemv(const LinearArgs& a, int first_panel, int end_panel) {
  const WeightKind kind = a.weight.kind;
  if (a.end_row - a.first_row > kGemvMaxRows) return false;
  if (kind != WeightKind::kInt4 && kind != WeightKind::kInt8) return false;
  if (kind == WeightKind::kInt4)
    multiply_gemv<Avx512Amx::Int4>(a, first_panel, end_panel);
  else
    multiply_gemv<Avx512Amx::Int8>(a, first_panel, end_panel);
  return true;
}

}  // namespace
}  // namespace ridgeline
