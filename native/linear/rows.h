// Rows on their way into a product: quantised, split into digits, laid out in blocks.
#pragma once
#include <string.h>

#include <limits>

#include "linear/engine.h"
#include "linear/linear.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

// The largest magnitude of `count` floats, at least 1e-30: a group of zeros needs a scale to divide
// by. NaN if one of them is: magnitudes are compared as integers, among which a NaN is the largest.
inline float max_magnitude(const float* x, int count) {
  Vi top = as_i(set_f(1e-30f));
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) top = max_i(top, as_i(abs_f(load_f(x + i))));
  if (i < count) {
    alignas(64) float rest[kLanes] = {};
    memcpy(rest, x + i, sizeof(float) * (count - i));
    top = max_i(top, as_i(abs_f(load_f(rest))));
  }
  const int32_t bits = reduce_max(top);
  float magnitude;
  memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}

// LinearOps::quantise. kQuantiseBlock is the instruction set's quantise_block. No integer stands
// for a NaN or an infinity: values of their group are 0 and its scale makes NaN of every result.
template <int kMaxBlock, void (*kQuantiseBlock)(const float*, Vf, int8_t*, Vi&)>
void quantise(const float* x, float row_scale, const QuantRows& to, int row) {
  const int block = block_of(to.group, kMaxBlock), pieces = (to.group + kBlock - 1) / kBlock;
  for (int g = 0; g < to.num_groups(); ++g) {
    const float* from = x + g * to.group;
    const int left_in_row = to.num_in - g * to.group;
    const int count = left_in_row < to.group ? left_in_row : to.group;
    const float max_value = static_cast<float>(to.max_value);
    const float top = row_scale > 0 ? max_value * row_scale : max_magnitude(from, count);
    const bool is_finite = top <= std::numeric_limits<float>::max();
    const Vf inverse = set_f(is_finite ? max_value / top : 0.0f);
    Vi sum = set_i(0);
    for (int b = 0; b < pieces; ++b) {
      const int at = b * kBlock, left = is_finite ? count - at : 0;
      const int64_t first = static_cast<int64_t>(g) * to.group + at / block * block;
      int8_t* values =
          to.values + first * to.num_rows + static_cast<int64_t>(row) * block + at % block;
      if (left >= kBlock && block >= kBlock) {
        kQuantiseBlock(from + at, inverse, values, sum);
        continue;
      }
      alignas(64) float padded[kBlock] = {};
      alignas(64) int8_t bytes[kBlock];
      if (left > 0) memcpy(padded, from + at, sizeof(float) * (left < kBlock ? left : kBlock));
      kQuantiseBlock(padded, inverse, bytes, sum);
      memcpy(values, bytes, static_cast<size_t>(block < kBlock ? block : kBlock));
    }
    to.scales[static_cast<int64_t>(g) * to.num_rows + row] = top / max_value;
    to.sums[static_cast<int64_t>(g) * to.num_rows + row] = reduce_add(sum);
  }
}

// LinearOps::subtract_quantised.
template <int kMaxBlock>
void subtract_quantised(const float* x, const QuantRows& rows, int row, float* rest) {
  const int block = block_of(rows.group, kMaxBlock);
  for (int k = 0; k < rows.num_in; k += kLanes) {
    const int64_t at = static_cast<int64_t>(k / block * block) * rows.num_rows +
                       static_cast<int64_t>(row) * block + k % block;
    const Vi values = load_s8(rows.values + at);
    const int64_t group = static_cast<int64_t>(k / rows.group) * rows.num_rows;
    const Vf negative_scale = set_f(-rows.scales[group + row]);
    if (rows.num_in - k >= kLanes) {
      store_f(rest + k, fma_f(to_f(values), negative_scale, load_f(x + k)));
      continue;
    }
    alignas(64) float padded[kLanes] = {};
    memcpy(padded, x + k, sizeof(float) * (rows.num_in - k));
    store_f(padded, fma_f(to_f(values), negative_scale, load_f(padded)));
    memcpy(rest + k, padded, sizeof(float) * (rows.num_in - k));
  }
}

// LinearOps::sum_digits.
inline void sum_digits(const float* digits, int num_digits, int64_t stride, const float* bias,
                       int count, float* out) {
  const Vf one = set_f(1.0f);  // a product with it is exact, so fma_f only adds
  const float* const last = digits + (num_digits - 1) * stride;
  int n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    Vf y = load_f(last + n);
    for (const float* next = last - stride; next >= digits; next -= stride)
      y = fma_f(load_f(next + n), one, y);
    store_f(out + n, bias ? fma_f(load_f(bias + n), one, y) : y);
  }
  for (; n < count; ++n) {
    float y = last[n];
    for (const float* next = last - stride; next >= digits; next -= stride) y += next[n];
    out[n] = bias ? y + bias[n] : y;
  }
}

// LinearOps::arrange for float rows.
inline void arrange_floats(WeightKind, const float* x, int num_in, int row, int num_rows,
                           void* prepared) {
  float* to = static_cast<float*>(prepared);
  for (int at = 0; at < num_in; at += kBlock) {
    const int count = num_in - at < kBlock ? num_in - at : kBlock;
    float* block = to + (static_cast<int64_t>(at / kBlock) * num_rows + row) * kBlock;
    memcpy(block, x + at, sizeof(float) * count);
    if (count < kBlock) memset(block + count, 0, sizeof(float) * (kBlock - count));
  }
}

// LinearOps::widen: of each four values a b c d, the 16-bit words a c b d, in the order in which
// Int8Words decodes weights.
template <int kMaxBlock>
void widen_row(const QuantRows& from, int row, int16_t* to) {
  const int block = block_of(from.group, kMaxBlock), blocks = from.padded_in() / block;
  for (int b = 0; b < blocks; ++b) {
    const int64_t at = (static_cast<int64_t>(b) * from.num_rows + row) * block;
    for (int k = 0; k < block; k += 4) {
      const int8_t* v = from.values + at + k;
      to[at + k] = v[0];
      to[at + k + 1] = v[2];
      to[at + k + 2] = v[1];
      to[at + k + 3] = v[3];
    }
  }
}

}  // namespace
}  // namespace ridgeline
