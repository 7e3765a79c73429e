#include "gated_ffn.h"

#include <math.h>
#include <string.h>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));

constexpr int kRows = 4, kOuts = 2;  // the register tile: kRows * kOuts sums
constexpr int kRowBlock = 32;        // rows that stay in L2 while a tile of weights stays in L1

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline float reduce_add(Vec v) {
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
}

// Level 0, as on paper: one multiply-add at a time, each waiting for the one before it.
__attribute__((optimize("no-tree-vectorize"))) float dot_plain(const float* a, const float* b,
                                                               int n) {
  float s = 0;
  for (int i = 0; i < n; ++i) s += a[i] * b[i];
  return s;
}

// Level 1, vectorisation: kLanes multiply-adds per instruction, and four sums, so that none waits for the
// one before it.
inline float dot_vectors(const float* a, const float* b, int n) {
  Vec s0 = {}, s1 = {}, s2 = {}, s3 = {};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + kLanes) * load(b + i + kLanes);
    s2 += load(a + i + 2 * kLanes) * load(b + i + 2 * kLanes);
    s3 += load(a + i + 3 * kLanes) * load(b + i + 3 * kLanes);
  }
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i];
  return reduce_add((s0 + s1) + (s2 + s3)) + rest;
}

// Level 2, threads: outputs are divided among them (`threads` of product and apply_gate).
template <float (*kDot)(const float*, const float*, int)>
void product(const GatedFfn& a, const float* w, float* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int o = 0; o < a.num_out; ++o)
    for (int r = 0; r < a.num_rows; ++r)
      y[static_cast<long>(r) * a.num_out + o] =
          kDot(a.x + static_cast<long>(r) * a.num_in, w + static_cast<long>(o) * a.num_in, a.num_in);
}

// Level 3, tiling: each vector that is loaded is used for a whole side of the tile, so a multiply-add
// costs (R + O) / (R * O) loads instead of two.
template <int R, int O>
inline void dot_tile(const float* const* a, const float* const* b, int n, float (*out)[O]) {
  Vec s[R][O] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Vec w[O];
    for (int o = 0; o < O; ++o) w[o] = load(b[o] + i);
    for (int r = 0; r < R; ++r) {
      const Vec x = load(a[r] + i);
      for (int o = 0; o < O; ++o) s[r][o] += x * w[o];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < O; ++o) {
      float rest = 0;
      for (int k = i; k < n; ++k) rest += a[r][k] * b[o][k];
      out[r][o] = reduce_add(s[r][o]) + rest;
    }
}

// Rows row .. end - 1 times two rows of weights; store(row, the two sums).
template <class Store>
void multiply_pair(const GatedFfn& a, const float* first, const float* second, int row, int end,
                   Store store) {
  for (int r = row; r < end; r += kRows) {
    const int count = end - r < kRows ? end - r : kRows;
    const float *x[kRows], *w[kOuts] = {first, second};
    for (int i = 0; i < kRows; ++i)
      x[i] = a.x + static_cast<long>(r + (i < count ? i : 0)) * a.num_in;
    float out[kRows][kOuts];
    if (count == kRows) {
      dot_tile<kRows, kOuts>(x, w, a.num_in, out);
    } else {
      for (int i = 0; i < count; ++i) dot_tile<1, kOuts>(x + i, w, a.num_in, out + i);
    }
    for (int i = 0; i < count; ++i) store(r + i, out[i]);
  }
}

void tiled_product(const GatedFfn& a, const float* w, float* y) {
  const int pairs = (a.num_out + 1) / 2;
  for (int row = 0; row < a.num_rows; row += kRowBlock) {
    const int end = row + kRowBlock < a.num_rows ? row + kRowBlock : a.num_rows;
#pragma omp parallel for num_threads(a.num_threads) schedule(static) if (a.num_threads > 1)
    for (int p = 0; p < pairs; ++p) {
      const int o = 2 * p, next = o + 1 < a.num_out ? o + 1 : o;
      const float* first = w + static_cast<long>(o) * a.num_in;
      const float* second = w + static_cast<long>(next) * a.num_in;
      multiply_pair(a, first, second, row, end, [&](int r, const float* sums) {
        y[static_cast<long>(r) * a.num_out + o] = sums[0];
        y[static_cast<long>(r) * a.num_out + next] = sums[next - o];
      });
    }
  }
}

inline float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

void apply_gate(const GatedFfn& a, int threads) {
  const long n = static_cast<long>(a.num_rows) * a.num_out;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long i = 0; i < n; ++i) a.h[i] = gated(a.gate[i], a.up[i]);
}

// Level 4, fusion: the gate and the up sums of an output are a tile's pair; only their product leaves the
// registers.
void fused(const GatedFfn& a) {
  for (int row = 0; row < a.num_rows; row += kRowBlock) {
    const int end = row + kRowBlock < a.num_rows ? row + kRowBlock : a.num_rows;
#pragma omp parallel for num_threads(a.num_threads) schedule(static) if (a.num_threads > 1)
    for (int o = 0; o < a.num_out; ++o) {
      const long at = static_cast<long>(o) * a.num_in;
      multiply_pair(a, a.g + at, a.u + at, row, end, [&](int r, const float* sums) {
        a.h[static_cast<long>(r) * a.num_out + o] = gated(sums[0], sums[1]);
      });
    }
  }
}

}  // namespace

void gated_ffn(Level level, const GatedFfn& a) {
  const int threads = level >= Level::kParallel ? a.num_threads : 1;
  switch (level) {
    case Level::kFused: return fused(a);
    case Level::kTiled:
      tiled_product(a, a.g, a.gate);
      tiled_product(a, a.u, a.up);
      break;
    case Level::kPlain:
      product<dot_plain>(a, a.g, a.gate, 1);
      product<dot_plain>(a, a.u, a.up, 1);
      break;
    default:
      product<dot_vectors>(a, a.g, a.gate, threads);
      product<dot_vectors>(a, a.u, a.up, threads);
  }
  apply_gate(a, threads);
}
