// Instructions on vectors of 512 bits that are written as assembly, because GCC 12 gathers all
// products of a tile first and then spills them, or that SIMDe does not emulate.
// native/tests/emulation has a twin of this file for CPUs without AVX-512.
//
// None of them needs a compiler flag beyond AVX-512 BW and VL; call those that need VNNI only where
// the CPU has it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace ridgeline {
namespace {

// sum + the four products of unsigned by signed bytes in each lane (VNNI).
inline __m512i dot_u8s8(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
// The same with the same four signed bytes in every lane, read from memory by the instruction.
inline __m512i dot_u8s8_memory(__m512i sum, __m512i a, const uint8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(a), "m"(*reinterpret_cast<const int32_t*>(four)));
  return sum;
}

// 16-bit sums + products of pairs of unsigned by signed bytes.
inline __m512i madd_u8s8_i16(__m512i sum, __m512i a, __m512i b) {
  __m512i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(a), "v"(b));
  return sum;
}

// sum + the products of both pairs of signed 16-bit words in each lane; kVnni: in one instruction.
template <bool kVnni>
inline __m512i dot_i16(__m512i sum, __m512i a, __m512i b) {
  if constexpr (kVnni) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  } else {
    __m512i product;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(a), "v"(b));
  }
  return sum;
}

// Whether expand_bytes runs here (VBMI2: Intel's cores from Ice Lake on, AMD's from Zen 4 on).
inline bool has_byte_expand() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vbmi2");
}
// `background`, its bytes whose bit is set replaced by those of `kept` in order; at most 32 bits.
inline __m512i expand_bytes(__m512i background, uint64_t mask, __m256i kept) {
  asm("vpexpandb %1, %0%{%2%}"
      : "+v"(background)
      : "v"(_mm512_castsi256_si512(kept)), "Yk"(static_cast<__mmask64>(mask)));
  return background;
}

// The first `count` of up to 16 numbers, zeros behind them.
inline __m512 load_first(const float* from, int count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}
inline __m512i load_first(const int32_t* from, int count) {
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), from);
}

}  // namespace
}  // namespace ridgeline
