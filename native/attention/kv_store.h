// Stores rows of floats in the cache, in its format: bit for bit what kv_format.py does.
#pragma once
#include <stdint.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/key_tile.h"
#include "simd/simd.h"

namespace ridgeline {
namespace {

inline void store_bf16_row(const float* x, int D, char* row) {  // ties to even; NaN stays NaN
  uint32_t bits[kMaxHeadDim];
  uint16_t halves[kMaxHeadDim];
  memcpy(bits, x, sizeof(float) * D);
  for (int d = 0; d < D; ++d) {
    const uint32_t b = bits[d], rounded = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
    const uint32_t quiet_nan = b >> 16 | 0x40;
    const bool is_nan = (b & 0x7FFFFFFFu) > 0x7F800000u;
    halves[d] = static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
  }
  memcpy(row, halves, sizeof(uint16_t) * D);
}

inline void store_f16_row(const float* x, int D, char* row) {
  uint16_t halves[kMaxHeadDim + kLanes];
  for (int d = 0; d < D; d += kLanes) {
    const PaddedCopy<kLanes * 4> padded(reinterpret_cast<const char*>(x + d), (D - d) * 4);
    store_f16(halves + d, load_f(reinterpret_cast<const float*>(padded.bytes)));
  }
  memcpy(row, halves, sizeof(uint16_t) * D);
}

// Writes a token's codes to their places (code_offset).
inline void store_codes(const StoreArgs& a, const char* codes, int t, char* block) {
  const int D = a.head_dim, B = a.block_size, whole = D / 4 * 4;
  if (a.side == KvSide::kValues) {
    const int64_t first = code_offset(a.side, B, D, t, 0);
    const int64_t step = code_offset(a.side, B, D, t, 1) - first;
    for (int d = 0; d < D; ++d) block[first + d * step] = codes[d];
    return;
  }
  for (int d = 0; d < whole; d += 4)
    memcpy(block + static_cast<int64_t>(d) * B + 4 * t, codes + d, 4);
  for (int d = whole; d < D; ++d) block[code_offset(a.side, B, D, t, d)] = codes[d];
}

// To E4M3, ties to even; |x| is at most 448, or rounds to it.
inline uint8_t e4m3_code(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  if (bits < 121u << 23) {  // below 2^-6: subnormal, in steps of 2^-9
    float size;
    memcpy(&size, &bits, sizeof size);
    size += 0x1p14f;  // whose last digit is 2^-9
    memcpy(&bits, &size, sizeof bits);
    bits -= 141u << 23;
  } else {
    bits = (bits - (120u << 23) + 0x7FFFF + (bits >> 20 & 1)) >> 20;
  }
  return static_cast<uint8_t>(bits | sign >> 24);
}

// A row as codes with one scale: int8 or fp8.
inline void store_coded_row(const StoreArgs& a, const float* x, int t, char* block) {
  const int D = a.head_dim;
  const float largest = a.kind == KvKind::kInt8 ? 127.0f : 448.0f;
  alignas(64) float padded[kMaxHeadDim + kLanes] = {};
  memcpy(padded, x, sizeof(float) * D);
  Vf max = set_f(0.0f);
  for (int d = 0; d < D; d += kLanes) max = max_f(abs_f(load_f(padded + d)), max);
  const float top = reduce_max(max);
  // Below 1e-30 the reciprocal would overflow: such a row is stored as zeros (as kv_format.py
  // does).
  const float inverse = top > 1e-30f ? largest / top : 0.0f, scale = top / largest;
  char bytes[kMaxHeadDim];
  if (a.kind == KvKind::kInt8) {
    int32_t codes[kMaxHeadDim + kLanes];
    for (int d = 0; d < D; d += kLanes)
      store_i(codes + d, to_i(mul_f(load_f(padded + d), set_f(inverse))));
    for (int d = 0; d < D; ++d) bytes[d] = static_cast<char>(codes[d] + 128);
  } else {
    for (int d = 0; d < D; ++d) bytes[d] = static_cast<char>(e4m3_code(padded[d] * inverse));
  }
  store_codes(a, bytes, t, block);
  memcpy(block + static_cast<int64_t>(D) * a.block_size + 4 * t, &scale, sizeof scale);
}

inline void store_row(const StoreArgs& a, const float* x, int t, char* block) {
  char* row = block + t * row_bytes(a.kind, a.head_dim);
  switch (a.kind) {
    case KvKind::kFloat32: memcpy(row, x, sizeof(float) * a.head_dim); return;
    case KvKind::kBfloat16: return store_bf16_row(x, a.head_dim, row);
    case KvKind::kFloat16: return store_f16_row(x, a.head_dim, row);
    case KvKind::kInt8:
    case KvKind::kFp8: return store_coded_row(a, x, t, block);
  }
}

// AttentionOps::store_rows.
inline void store_rows(const StoreArgs& a) {
  for (int i = 0; i < a.num_rows; ++i)
    store_row(a, a.from + i * a.stride_from, a.within[i], a.blocks[i]);
}

}  // namespace
}  // namespace ridgeline
