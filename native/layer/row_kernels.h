// RowOps in plain C++, compiled once per ISA with kLanes floats per vector.
#pragma once
#include <math.h>
#include <string.h>

#include "layer/row_ops.h"
#include "simd/generic.h"

namespace ridgeline {
namespace {

template <int kLanes>
struct RowKernels : Generic<kLanes> {
  using Base = Generic<kLanes>;
  using Vec = typename Base::Vec;
  using Mask = typename Base::Mask;
  using Base::load;
  using Base::load_first;
  using Base::select;
  using Base::splat;
  using Base::store;
  using Base::store_first;
  static constexpr int kSums = 16, kVecs = kSums / kLanes;

  // y[i] = f(i-th vectors of the inputs), tails included.
  template <class F>
  static inline void map(int n, float* y, F f, const float* a, const float* b) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(a + i), load(b + i)));
    if (i < n) store_first(y + i, f(load_first(a + i, n - i), load_first(b + i, n - i)), n - i);
  }

  // e^x by range reduction and a polynomial of degree 6, relative error < 3e-7; 0 below -87,
  // infinite from 88 on.
  static inline Vec exp(Vec x) {
    const Mask in_range = x > splat(-87.0f), high = x >= splat(88.0f);
    x = (Vec)((Mask)x & in_range & ~high);
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const Vec shifted = x * splat(1.44269504f) + magic;
    const Vec n = shifted - magic;
    const Vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    Vec p = splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const Mask bits = ((Mask)shifted << 23) + (Mask)p;  // n is in the low bits of `shifted`
    return select(high, splat(INFINITY), (Vec)(bits & in_range));
  }

  static inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

  static void add(float* x, const float* y, int n) {
    map(n, x, [](Vec a, Vec b) { return a + b; }, x, y);
  }

  static float dot(const float* x, const float* y, int n) {
    Vec sums[kVecs] = {};
    int i = 0;
    for (; i + kSums <= n; i += kSums)
      for (int v = 0; v < kVecs; ++v)
        sums[v] = sums[v] + load(x + i + v * kLanes) * load(y + i + v * kLanes);
    float a[kSums] = {}, b[kSums] = {}, s[kSums];
    memcpy(a, x + i, sizeof(float) * static_cast<size_t>(n - i));
    memcpy(b, y + i, sizeof(float) * static_cast<size_t>(n - i));
    for (int v = 0; v < kVecs; ++v)
      store(s + v * kLanes, sums[v] + load(a + v * kLanes) * load(b + v * kLanes));
    for (int half = kSums / 2; half; half /= 2)
      for (int j = 0; j < half; ++j) s[j] = s[j] + s[j + half];
    return s[0];
  }

  static float inverse_rms(const float* x, int n, float eps) {
    return 1.0f / sqrtf(dot(x, x, n) / static_cast<float>(n) + eps);
  }

  static void scale(const float* x, float by, const float* gain, int n, float* y) {
    const Vec factor = splat(by);
    if (gain) return map(n, y, [factor](Vec a, Vec g) { return a * factor * g; }, x, gain);
    map(n, y, [factor](Vec a, Vec) { return a * factor; }, x, x);
  }

  static inline Vec silu(Vec x) { return x * sigmoid(x); }

  // x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
  static inline Vec gelu_tanh(Vec x) {
    return x * sigmoid(splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x));
  }

  static inline Vec gelu(Vec x) {
    for (int i = 0; i < kLanes; ++i) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return x;
  }

  static inline Vec relu(Vec x) { return select(x > splat(0.0f), x, splat(0.0f)); }

  static inline Vec clamped_swiglu(Vec gate, Vec up) {
    const Vec limit = splat(7.0f);
    gate = select(gate > limit, limit, gate);
    up = select(up > limit, limit, select(up < -limit, -limit, up));
    return gate * sigmoid(gate * splat(1.702f)) * (up + splat(1.0f));
  }

  static void gate(Activation activation, const float* gate, const float* up, int n, float* y) {
    switch (activation) {
      case Activation::kSilu: return map(n, y, [](Vec a, Vec b) { return silu(a) * b; }, gate, up);
      case Activation::kGeluTanh:
        return map(n, y, [](Vec a, Vec b) { return gelu_tanh(a) * b; }, gate, up);
      case Activation::kRelu2:
        return map(n, y, [](Vec a, Vec b) { return relu(a) * relu(a) * b; }, gate, up);
      case Activation::kClampedSwiglu:
        return map(n, y, [](Vec a, Vec b) { return clamped_swiglu(a, b); }, gate, up);
      case Activation::kGelu: return map(n, y, [](Vec a, Vec b) { return gelu(a) * b; }, gate, up);
    }
  }

  static void rotate(float* x, const float* cos, const float* sin, int rotated) {
    const int half = rotated / 2;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const Vec a = load(x + i), b = load(x + half + i);
      store(x + i, a * load(cos + i) + b * load(sin + i));
      store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; ++i) {
      const float a = x[i], b = x[half + i];
      x[i] = a * cos[i] + b * sin[i];
      x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
  }

  static void widen_bf16(const uint16_t* from, float by, int n, float* to) {
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      float x;
      memcpy(&x, &bits, 4);
      to[i] = x * by;
    }
  }

  static void softmax_weights(const float* x, float largest, float temperature, int64_t n,
                              float* y) {
    const Vec top = splat(largest), divisor = splat(temperature);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, exp((load(x + i) - top) / divisor));
    const int left = static_cast<int>(n - i);
    if (left) store_first(y + i, exp((load_first(x + i, left) - top) / divisor), left);
  }

  // Each lane keeps its own first largest (only a larger value replaces it), then the lanes are
  // compared.
  static int64_t argmax(const float* x, int64_t n) {
    Vec best = splat(-INFINITY);
    Mask best_at = {}, nans = {};
    const int64_t whole = n / kLanes;
    for (int64_t i = 0; i < whole; ++i) {
      const Vec v = load(x + i * kLanes);
      const Mask larger = v > best;
      nans = nans | (v != v);
      best = select(larger, v, best);
      best_at = (best_at & ~larger) | ((Mask{} + static_cast<int32_t>(i)) & larger);
    }
    int64_t at = -1;
    float top = -INFINITY;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (nans[lane]) return -1;
      const int64_t index = static_cast<int64_t>(best_at[lane]) * kLanes + lane;
      if (whole && (at < 0 || best[lane] > top || (best[lane] == top && index < at))) {
        top = best[lane];
        at = index;
      }
    }
    for (int64_t i = whole * kLanes; i < n; ++i) {
      if (x[i] != x[i]) return -1;
      if (at < 0 || x[i] > top) {
        top = x[i];
        at = i;
      }
    }
    return at;
  }

  static RowOps ops(const char* isa) {
    return {isa, add, dot, inverse_rms, scale, gate, rotate, widen_bf16, softmax_weights, argmax};
  }
};

}  // namespace
}  // namespace ridgeline
