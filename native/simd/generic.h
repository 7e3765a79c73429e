// Vectors of kLanes floats on GCC's vector extensions: for kernels in plain C++ that are compiled
// once per instruction set and leave the choice of instructions to the compiler.
#pragma once
#include <stdint.h>
#include <string.h>

namespace ridgeline {
namespace {

template <int kLanes>
struct Generic {
  typedef float Vec __attribute__((vector_size(kLanes * 4)));
  typedef int32_t Mask __attribute__((vector_size(kLanes * 4)));

  static inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }
  static inline Vec splat(float x) { return Vec{} + x; }
  static inline Vec select(Mask mask, Vec a, Vec b) {
    return (Vec)(((Mask)a & mask) | ((Mask)b & ~mask));
  }

  // The first `count` < kLanes floats, zeros behind them.
  static inline Vec load_first(const float* p, int count) {
    Vec v = {};
    memcpy(&v, p, sizeof(float) * static_cast<size_t>(count));
    return v;
  }
  static inline void store_first(float* p, Vec v, int count) {
    memcpy(p, &v, sizeof(float) * static_cast<size_t>(count));
  }
};

}  // namespace
}  // namespace ridgeline
