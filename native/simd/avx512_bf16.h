// Products of bfloat16 on vectors of 512 bits (AVX-512 BF16). native/tests/emulation has a twin of
// this file for CPUs without them.
#pragma once
#include <immintrin.h>

namespace ridgeline {
namespace {

// sum + the products of both pairs of bfloat16 in each lane: the odd one first, one rounding each.
inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// 32 floats as bfloat16, in order; ties to even.
inline __m512i to_bf16(__m512 a, __m512 b) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
}

}  // namespace
}  // namespace ridgeline
