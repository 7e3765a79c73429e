// The multiply-adds of the linear and attention kernels in registers, nothing loaded: one loop per
// instruction sequence and vector width. probe.cpp calls a loop only after asking the CPU;
// tests/check_probe.cpp compares the sums with what each loop says it did.
//
// Each sum depends only on itself; there are enough of them to hide the latency of two multipliers.
#pragma once
#include <stdint.h>

#include <string>

#include "probe/instructions.h"

namespace ridgeline {
namespace {

// Adds what a loop leaves in its sums to `total`, lane by lane, for the check; the probe passes
// nullptr.
template <class Lane, class Sum, int NUM>
inline void add_lanes(const Sum (&sums)[NUM], double* total) {
  if (!total) return;
  Lane lanes[NUM * (sizeof(Sum) / (sizeof(Lane)))];
  __builtin_memcpy(lanes, sums, sizeof(sums));
  for (Lane lane : lanes) *total += static_cast<double>(lane);
}

// float32: one fused multiply-add per lane, on NUM sums of 256 or 512 bits.
#define FLOAT_LOOP(NAME, FEATURES, VECTOR, SET, FMA, NUM)                      \
  RL_TARGET(FEATURES) double NAME(uint64_t turns, double* total) {             \
    VECTOR sum[NUM];                                                           \
    const VECTOR x = SET(1.0f), y = SET(0.5f);                                 \
    _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) sum[j] = SET(0.0f); \
    for (uint64_t i = 0; i < turns; ++i) {                                     \
      _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j)                   \
          RL_FMA("vfmadd231ps", FMA, sum[j], x, y);                            \
    }                                                                          \
    add_lanes<float>(sum, total);                                              \
    return 2.0 * sizeof(VECTOR) / 4 * NUM * turns;                             \
  }
FLOAT_LOOP(float_avx2, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, 12)
FLOAT_LOOP(float_avx512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, 24)

// bfloat16 with a dot product instruction: two multiply-adds per lane.
RL_TARGET("avx512f") double bf16_dot(uint64_t turns, double* total) {
  constexpr int kNum = 24;
  __m512 sum[kNum];
  const __m512i x = _mm512_set1_epi32(0x3F803F80), y = _mm512_set1_epi32(0x3F003F00);  // 1, 0.5
  _Pragma("GCC unroll 24") for (int j = 0; j < kNum; ++j) sum[j] = _mm512_set1_ps(0.0f);
  for (uint64_t i = 0; i < turns; ++i) {
    _Pragma("GCC unroll 24") for (int j = 0; j < kNum; ++j)
        RL_ACCUMULATE("vdpbf16ps", dot_bf16, sum[j], x, y);
  }
  add_lanes<float>(sum, total);
  return 2.0 * sizeof(__m512i) / 2 * kNum * turns;
}

// Bytes with a dot product instruction: four multiply-adds per lane. AVX-VNNI encodes it as AVX2
// does.
#define BYTE_LOOP(NAME, FEATURES, VECTOR, SET32, ASSEMBLY, DOT, NUM)          \
  RL_TARGET(FEATURES) double NAME(uint64_t turns, double* total) {            \
    VECTOR sum[NUM];                                                          \
    const VECTOR x = SET32(0x01010101), y = x;                                \
    _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) sum[j] = SET32(0); \
    for (uint64_t i = 0; i < turns; ++i) {                                    \
      _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j)                  \
          RL_ACCUMULATE(ASSEMBLY, DOT, sum[j], x, y);                         \
    }                                                                         \
    add_lanes<int32_t>(sum, total);                                           \
    return 2.0 * sizeof(VECTOR) * NUM * turns;                                \
  }
BYTE_LOOP(bytes_avxvnni, "avx2", __m256i, _mm256_set1_epi32, "%{vex%} vpdpbusd",
          _mm256_dpbusd_epi32, 12)
BYTE_LOOP(bytes_avx512vnni, "avx512f", __m512i, _mm512_set1_epi32, "vpdpbusd", _mm512_dpbusd_epi32,
          24)

// Winograd's inner product with plain products between, as in linear/int4_winograd.h: of sixteen
// multiply-adds per lane, twelve are paired and take six products. (GCC 12 keeps the sums in memory
// where nested loops use them.)
#define PAIR_SUM(j)                                                           \
  do {                                                                        \
    __m512i first, second;                                                    \
    RL_COMPUTE("vpaddb", _mm512_add_epi8, first, x, y);                       \
    RL_COMPUTE("vpaddb", _mm512_add_epi8, second, x, y);                      \
    RL_ACCUMULATE("vpdpbusd", _mm512_dpbusd_epi32, paired[j], first, second); \
  } while (false)
#define FIVE_SUMS(k)                                                          \
  PAIR_SUM(3 * (k));                                                          \
  PAIR_SUM(3 * (k) + 1);                                                      \
  RL_ACCUMULATE("vpdpbusd", _mm512_dpbusd_epi32, plain[2 * (k)], ones, ones); \
  PAIR_SUM(3 * (k) + 2);                                                      \
  RL_ACCUMULATE("vpdpbusd", _mm512_dpbusd_epi32, plain[2 * (k) + 1], ones, ones)
RL_TARGET("avx512f,avx512bw") double winograd_avx512(uint64_t turns, double* total) {
  constexpr int kTimes = 4, kPairs = 3 * kTimes, kPlain = 2 * kTimes;
  __m512i paired[kPairs], plain[kPlain];
  const __m512i x = _mm512_set1_epi32(0x01000100), y = _mm512_set1_epi32(0x00010001),
                ones = _mm512_set1_epi32(0x01010101);
  _Pragma("GCC unroll 24") for (int j = 0; j < kPairs; ++j) paired[j] = _mm512_set1_epi32(0);
  _Pragma("GCC unroll 24") for (int j = 0; j < kPlain; ++j) plain[j] = _mm512_set1_epi32(0);
  for (uint64_t i = 0; i < turns; ++i) {
    FIVE_SUMS(0);
    FIVE_SUMS(1);
    FIVE_SUMS(2);
    FIVE_SUMS(3);
  }
  double of_plain = 0;
  add_lanes<int32_t>(paired, total);
  add_lanes<int32_t>(plain, total ? &of_plain : nullptr);
  if (total) *total = 2 * *total + of_plain;  // each product of pairs counts as two
  return 2.0 * (2 * kPairs + kPlain) * sizeof(__m512i) * turns;
}

// AMX tiles: 16 rows of 64 bytes times 64 x 16, on four tiles of sums, which come out equal.
#if RL_HAS_TILE_LOOPS
template <bool FLOATS>
void multiply_tiles(uint64_t turns, int32_t four, int32_t (&sums)[16 * 16]) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  alignas(64) int32_t tile[16 * 16];
  for (int32_t& word : tile) word = four;
  asm volatile("ldtilecfg %0" ::"m"(shapes));  // which clears every tile
  asm volatile(
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%0,%1,1), %%tmm5\n\t"
      "tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm7" ::"r"(tile),
      "r"(int64_t{64})
      : "memory");
  for (uint64_t i = 0; i < turns; ++i)
    if (FLOATS)
      asm volatile(
          "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
          "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    else
      asm volatile(
          "tdpbssd %tmm6, %tmm4, %tmm0\n\ttdpbssd %tmm7, %tmm4, %tmm1\n\t"
          "tdpbssd %tmm6, %tmm5, %tmm2\n\ttdpbssd %tmm7, %tmm5, %tmm3");
  asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(sums), "r"(int64_t{64}) : "memory");
  asm volatile("tilerelease");
}
double bytes_tiles(uint64_t turns, double* total) {
  int32_t sums[16 * 16];
  multiply_tiles<false>(turns, 0x01010101, sums);
  if (total)
    for (int32_t sum : sums) *total += 4.0 * sum;
  return 4 * 2.0 * 16 * 16 * 64 * static_cast<double>(turns);
}
double bf16_tiles(uint64_t turns, double* total) {
  int32_t sums[16 * 16];
  multiply_tiles<true>(turns, 0x3F803F80, sums);
  if (total)
    for (int32_t bits : sums) {
      float sum;
      __builtin_memcpy(&sum, &bits, sizeof sum);
      *total += 4.0 * sum;
    }
  return 4 * 2.0 * 16 * 16 * 32 * static_cast<double>(turns);
}
// bfloat16 weights times float rows, split into three bfloat16: of three instructions one counts.
double bf16x3_tiles(uint64_t turns, double* total) {
  const double did = bf16_tiles(turns, total);
  if (total) *total /= 3;
  return did / 3;
}
#endif

// Bytes without such an instruction take three: pairs to 16 bits, pairs of those to 32 bits, and
// add.
#define THREE_LOOP(NAME, FEATURES, VECTOR, P, NUM)                                     \
  RL_TARGET(FEATURES) double NAME(uint64_t turns, double* total) {                     \
    VECTOR sum[NUM];                                                                   \
    const VECTOR x = P##_set1_epi32(0x01010101), ones = P##_set1_epi32(0x00010001);    \
    _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) sum[j] = P##_set1_epi32(0); \
    for (uint64_t i = 0; i < turns; ++i) {                                             \
      _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) {                         \
        VECTOR two, four;                                                              \
        RL_COMPUTE("vpmaddubsw", P##_maddubs_epi16, two, x, x);                        \
        RL_COMPUTE("vpmaddwd", P##_madd_epi16, four, two, ones);                       \
        RL_COMPUTE("vpaddd", P##_add_epi32, sum[j], sum[j], four);                     \
      }                                                                                \
    }                                                                                  \
    add_lanes<int32_t>(sum, total);                                                    \
    return 2.0 * sizeof(VECTOR) * NUM * turns;                                         \
  }
THREE_LOOP(bytes_avx2, "avx2", __m256i, _mm256, 10)
THREE_LOOP(bytes_avx512, "avx512f,avx512bw", __m512i, _mm512, 20)

// The exact sequence for 4-bit weights: eight products of pairs fit 16 bits, then they are widened
// once.
#define NIBBLE_LOOP(NAME, FEATURES, VECTOR, P, NUM)                                 \
  RL_TARGET(FEATURES) double NAME(uint64_t turns, double* total) {                  \
    VECTOR sum[2], part[NUM];                                                       \
    const VECTOR x = P##_set1_epi32(0x01010101), ones = P##_set1_epi32(0x00010001); \
    sum[0] = sum[1] = P##_set1_epi32(0);                                            \
    for (uint64_t i = 0; i < turns; ++i) {                                          \
      _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j)                        \
          RL_COMPUTE("vpmaddubsw", P##_maddubs_epi16, part[j], x, x);               \
      _Pragma("GCC unroll 8") for (int k = 1; k < 8; ++k) {                         \
        _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) {                    \
          VECTOR two;                                                               \
          RL_COMPUTE("vpmaddubsw", P##_maddubs_epi16, two, x, x);                   \
          RL_COMPUTE("vpaddw", P##_add_epi16, part[j], part[j], two);               \
        }                                                                           \
      }                                                                             \
      _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) {                      \
        VECTOR four;                                                                \
        RL_COMPUTE("vpmaddwd", P##_madd_epi16, four, part[j], ones);                \
        RL_COMPUTE("vpaddd", P##_add_epi32, sum[j % 2], sum[j % 2], four);          \
      }                                                                             \
    }                                                                               \
    add_lanes<int32_t>(sum, total);                                                 \
    return 2.0 * sizeof(VECTOR) * 8 * NUM * turns;                                  \
  }
NIBBLE_LOOP(nibbles_avx2, "avx2", __m256i, _mm256, 10)
NIBBLE_LOOP(nibbles_avx512, "avx512f,avx512bw", __m512i, _mm512, 20)

// The exact sequence for full-range 8-bit weights: 16-bit words, two products of pairs per 32
// bytes.
#define WORD_LOOP(NAME, FEATURES, VECTOR, P, NUM)                                      \
  RL_TARGET(FEATURES) double NAME(uint64_t turns, double* total) {                     \
    VECTOR sum[NUM];                                                                   \
    const VECTOR x = P##_set1_epi32(0x00010001);                                       \
    _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) sum[j] = P##_set1_epi32(0); \
    for (uint64_t i = 0; i < turns; ++i) {                                             \
      _Pragma("GCC unroll 24") for (int j = 0; j < NUM; ++j) {                         \
        VECTOR two;                                                                    \
        RL_COMPUTE("vpmaddwd", P##_madd_epi16, two, x, x);                             \
        RL_COMPUTE("vpaddd", P##_add_epi32, sum[j], sum[j], two);                      \
      }                                                                                \
    }                                                                                  \
    add_lanes<int32_t>(sum, total);                                                    \
    return 2.0 * sizeof(VECTOR) / 2 * NUM * turns;                                     \
  }
WORD_LOOP(words_avx2, "avx2", __m256i, _mm256, 12)
WORD_LOOP(words_avx512, "avx512f,avx512bw", __m512i, _mm512, 24)

// Visits the loops of a kind ("float32", "bf16", "bf16_kv", "int4", "int16", "int8"), best first,
// each with the name of the kernel variant that multiplies so (linear/variants.h). `can` says
// whether the CPU runs a variant.
template <class Can, class Visit>
void each_multiply_loop(const std::string& kind, Can can, Visit visit) {
  const bool bytes = kind == "int4" || kind == "int16" || kind == "int8";
#if RL_HAS_TILE_LOOPS
  if (kind == "bf16") visit("avx512amx", bf16x3_tiles, can("avx512amx"));
  if (kind == "bf16_kv") visit("avx512amx", bf16_tiles, can("avx512amx"));
#endif
  if (kind == "bf16_kv") visit("avx512pairs", bf16_dot, can("avx512bf16"));
  if (kind == "float32" || kind == "bf16" || kind == "bf16_kv") {
    visit("avx512", float_avx512, can("avx512"));
    visit("avx2", float_avx2, can("avx2"));
  }
  if (!bytes) return;
  const auto wide = kind == "int4" ? nibbles_avx512 : kind == "int16" ? words_avx512 : bytes_avx512;
  const auto narrow = kind == "int4" ? nibbles_avx2 : kind == "int16" ? words_avx2 : bytes_avx2;
#if RL_HAS_TILE_LOOPS
  visit("avx512amx", bytes_tiles, can("avx512amx"));
#endif
  visit("avx512pairs", kind == "int4" ? winograd_avx512 : bytes_avx512vnni, can("avx512pairs"));
  visit("avx512vnni", bytes_avx512vnni, can("avx512vnni"));
  visit("avx512", wide, can("avx512"));
  visit("avxvnni", bytes_avxvnni, can("avxvnni"));
  visit("avx2", narrow, can("avx2"));
}

#undef PAIR_SUM
#undef FIVE_SUMS
#undef FLOAT_LOOP
#undef BYTE_LOOP
#undef THREE_LOOP
#undef NIBBLE_LOOP
#undef WORD_LOOP

}  // namespace
}  // namespace ridgeline
