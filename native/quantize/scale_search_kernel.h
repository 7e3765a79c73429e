// The search of scale_search.h in plain C++, compiled once per ISA with kLanes floats per vector
// and register tiles kVectors vectors wide. All candidates of a row are multiplied with the moments
// together: a small product of the row's own.
#pragma once
#include <string.h>

#include "quantize/scale_search.h"
#include "simd/generic.h"

namespace ridgeline {
namespace {

template <int kLanes, int kVectors>
struct ScaleSearch {
  using Base = Generic<kLanes>;
  using Vec = typename Base::Vec;
  static constexpr int kTile = 6;  // candidates: kTile * kVectors sums in registers
  // 1.5 * 2^23: a small number that is added to it loses its fraction.
  static constexpr float kRounding = 12582912.0f;

  static inline Vec load(const float* p) { return Base::load(p); }
  static inline void store(float* p, Vec v) { Base::store(p, v); }
  static inline Vec splat(float x) { return x - Vec{}; }

  // Adds to `losses` what kWidth vectors of inputs from `at` on contribute to kTile candidates'
  // e H e' + 2 others e'. H is symmetric: what is behind these inputs counts twice, what is before
  // them was counted there.
  template <int kWidth>
  static void add_columns(const float* e, const float* others, const float* moment, int size,
                          int pitch, int at, float* losses) {
    Vec sums[kTile][kWidth] = {};
    const int end = at + kWidth * kLanes < size ? at + kWidth * kLanes : size;
    const auto add_rows = [&](int from, int to) {
      for (int k = from; k < to; ++k) {
        Vec h[kWidth];
        for (int v = 0; v < kWidth; ++v)
          h[v] = load(moment + static_cast<long>(k) * pitch + at + v * kLanes);
        for (int c = 0; c < kTile; ++c)
          for (int v = 0; v < kWidth; ++v) sums[c][v] += e[c * kMaxSearchGroup + k] * h[v];
      }
    };
    add_rows(end, size);
    for (int v = 0; v < kWidth; ++v) {
      const Vec from_others = load(others + at + v * kLanes);
      for (int c = 0; c < kTile; ++c) sums[c][v] = 2.0f * (sums[c][v] + from_others);
    }
    add_rows(at, end);
    for (int c = 0; c < kTile; ++c) {
      Vec loss = {};
      for (int v = 0; v < kWidth; ++v)
        loss += sums[c][v] * load(e + c * kMaxSearchGroup + at + v * kLanes);
      for (int i = 0; i < kLanes; ++i) losses[c] += loss[i];
    }
  }

  // The errors of one candidate; inputs beyond the group have weight 0, and no error.
  static inline void round_to(const float* w, int pitch, float scale, float zero,
                              const ScaleSearchArgs& a, float* e) {
    const float inverse = 1.0f / scale;
    const Vec low = splat(a.low), high = splat(a.high);
    for (int i = 0; i < pitch; i += kLanes) {
      const Vec value = load(w + i);
      Vec q = value * inverse + zero;
      q = q < low ? low : q;
      q = q > high ? high : q;
      q = (q + kRounding) - kRounding;
      store(e + i, (q - zero) * scale - value);
    }
  }

  // The best candidate of a row, whose error replaces `error`; -1 if none beats it.
  static int search_row(const ScaleSearchArgs& a, const float* w, const float* others,
                        const float* scales, const float* zeros, float* error) {
    const int pitch = (a.size + 15) / 16 * 16, num = 1 + a.num_scales * a.num_zeros;
    alignas(64) float e[(kMaxCandidates + 1) * kMaxSearchGroup];
    alignas(64) float value[kMaxSearchGroup], padded_others[kMaxSearchGroup];
    for (int i = 0; i < pitch; ++i) {
      value[i] = i < a.size ? w[i] : 0.0f;
      padded_others[i] = i < a.size ? others[i] : 0.0f;
      e[i] = i < a.size ? error[i] : 0.0f;
    }
    for (int at = 1; at < num; ++at)
      round_to(value, pitch, scales[(at - 1) / a.num_zeros], zeros[(at - 1) % a.num_zeros], a,
               e + at * kMaxSearchGroup);
    const int filled = (num + kTile - 1) / kTile * kTile;
    for (int at = num; at < filled; ++at)
      memcpy(e + at * kMaxSearchGroup, e, pitch * sizeof(float));
    float losses[kMaxCandidates + 1] = {};
    for (int at = 0; at < filled; at += kTile) {
      const float* tile = e + at * kMaxSearchGroup;
      int column = 0;
      for (; column + kVectors * kLanes <= pitch; column += kVectors * kLanes)
        add_columns<kVectors>(tile, padded_others, a.moment, a.size, pitch, column, losses + at);
      for (; column < pitch; column += kLanes)
        add_columns<1>(tile, padded_others, a.moment, a.size, pitch, column, losses + at);
    }
    int best = 0;
    for (int at = 1; at < num; ++at)
      if (losses[at] < losses[best]) best = at;
    if (best > 0) memcpy(error, e + best * kMaxSearchGroup, a.size * sizeof(float));
    return best - 1;
  }

  static void search(const ScaleSearchArgs& a) {
#pragma omp parallel for num_threads(a.num_threads) schedule(static) if (a.num_threads > 1)
    for (int row = 0; row < a.num_rows; ++row)
      a.chosen[row] =
          search_row(a, a.weight + row * a.stride, a.others + static_cast<long>(row) * a.size,
                     a.scales + static_cast<long>(row) * a.num_scales,
                     a.zeros + static_cast<long>(row) * a.num_zeros, a.error + row * a.stride);
  }
};

}  // namespace
}  // namespace ridgeline
