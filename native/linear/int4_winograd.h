// INT4 by Winograd's inner product: fewer products, paid for with additions, on vectors of 512 bits
// with VNNI.
//
// For rows x and weights w, both integers (Winograd, "A New Algorithm for Inner Product", IEEE
// Trans. Computers C-17, 1968):
//   (x0 + w1) * (x1 + w0) = x0 * w0 + x1 * w1 + x0 * x1 + w0 * w1
// The third term depends on the row alone and the fourth on the weight alone; both are subtracted
// once per group. So one vpdpbusd and two vpaddb do what two vpdpbusd did. Where bytes are added on
// more ports than they are multiplied (Zen 4 and 5: four against two), these three take three
// quarters of the time; where both share two ports (Intel's cores) they take half as long again,
// and this variant is not chosen. Pairs alone would fill the multiplying ports with additions as
// well: so the first of a block's four lines is multiplied plainly, its products interleaved with
// the others', and five products and six additions do what were eight products.
//
// A byte holds such a sum because w is a nibble and |x| <= kMaxInt4Value: x0 + 128 + (w1 - 8) is in
// 0 .. 255, and x1 + (w0 - 8) in -128 .. 127. A line's low nibbles are w0 of 16 outputs x 4 pairs,
// its high nibbles w1. Rows have 120 added or 8 subtracted already, except a block's first eight
// (see pair_row), so that nibbles are added as they are. All sums are exact, as those of plain
// products are: the bits are the same.
//
// Per group, let D be the sum that comes out, S that of x * (q - zero), P that of (x0 + 128) * x1
// over the pairs plus 8 * x over the plain ones, and C that of (w1 + 120) * (w0 - 8), which is D
// for x = 0:
//   S = D - C - P + (8 - zero) * sum(x)
// C is computed as lines are decoded; stored with the weights it would make them 6 to 22 % larger.
// Sums start from kIntegerOffset's bits (plus the last term, minus C where it is known by then), so
// that they end as floats of that and an integer below 2^22.
#pragma once
#include "linear/engines_avx512.h"
#include "linear/int4_winograd_instructions.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "simd/avx512.h"
#include "simd/compiler.h"

namespace ridgeline {
namespace {

static_assert(kMaxInt4Value + 15 + 120 <= 255 && kMaxInt4Value - 8 + 15 <= 127 &&
                  8 + kMaxInt4Value <= 128,
              "sums of a row's value and a nibble must fit a byte");
static_assert(48 * 255 * 128 + 32 * 15 * kMaxInt4Value + 128 * kMaxInt4Value * (kMaxZero - 8) <
                  1 << 22,
              "the sum of a group of 128 inputs must stay below 2^22");

constexpr int kWinogradMinRows = 7;  // fewer rows wait for memory
// Few rows are one tile of one panel, and lines are decoded in registers. More are tiles of fewer
// rows and two panels, which share the loads of a row; lines are decoded into L1. Results are in L1
// from group to group.
constexpr int kWinogradFewRows = 16, kWinogradTileRows = 8;
constexpr int kWinogradFewRowBlocks = 64, kWinogradBlocks = 16;  // inputs at once: 2048 and 512
constexpr int kWinogradPrefetch = 160,
              kWinogradNearPrefetch = 24;   // lines: into L2, from it into L1
constexpr int kWinogradPrefetchBlocks = 2;  // blocks from the rows multiplied to those prefetched
constexpr int kBlockLines = 4;
// Bytes of a decoded panel: each line's low nibbles, then its high ones.
constexpr int kDecodedPanelBytes = kWinogradBlocks * kBlockLines * 2 * kLineBytes;

using WinogradInt4 = Avx512Vnni::Int4;

// A copy of a pointer whose origin the compiler does not know: it would otherwise keep every
// address at a fixed distance from it in a register.
template <class T>
RL_INLINE T* launder(T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// sum + C, the product of these weights with a row of zeros.
RL_INLINE Vi add_weight_term(Vi sum, Vi low, Vi high) {
  return dot_of_sums(sum, _mm512_set1_epi8(120), _mm512_set1_epi8(-8), low, high);
}

RL_INLINE Vi integer_offset() { return as_i(set_f(kIntegerOffset)); }

struct WinogradParams : GroupParams {
  // What sums start from: kIntegerOffset's bits, minus C where lines are decoded beforehand.
  int32_t start[kPanel];
};

// Params of `num` groups of a panel from `first` on; their sums start without C.
inline void load_winograd_params(const PackedWeight& w, int panel, int first, int num,
                                 WinogradParams* to) {
  load_group_params<WinogradInt4>(w, panel, first, num, to);
  for (int g = 0; g < num; ++g) store_i(to[g].start, integer_offset());
}

// Decodes `num_blocks` blocks of a panel from `line` on into nibbles, and subtracts C from where
// their groups' sums start.
inline void decode_winograd(const uint8_t* line, int num_blocks, int per_group, uint8_t* to,
                            WinogradParams* params) {
  for (int b = 0; b < num_blocks; b += per_group, ++params) {
    Vi weight_term = set_i(0);
    for (int i = 0; i < per_group; ++i)
      RL_UNROLL for (int l = 0; l < kBlockLines; ++l, line += kLineBytes, to += 2 * kLineBytes) {
        Vi w[2][1];
        WinogradInt4::decode(line, w);
        store_i(to, w[0][0]);
        store_i(to + kLineBytes, w[1][0]);
        if (l > 0) weight_term = add_weight_term(weight_term, w[0][0], w[1][0]);
      }
    store_i(params->start, _mm512_sub_epi32(integer_offset(), weight_term));
  }
}

struct WinogradChunk {
  const LinearArgs& a;
  int group, num_groups;         // the first one, and how many
  const WinogradParams* params;  // of each panel, kWinogradBlocks apart
  const uint8_t* at;             // lines of one panel, or nibbles of each, kDecodedPanelBytes apart
  const uint8_t* x;              // the first block, first row of all
  const uint8_t* prefetch;  // lines are prefetched from here on, one with each line that is used,
  int64_t step;             // `step` bytes further; of the second panel a panel further on
};

// What a row has for each group.
struct WinogradRow {
  const int32_t* sums;
  const float *scales, *offsets;
  int64_t num_rows;
  void next_group() { sums += num_rows, scales += num_rows, offsets += num_rows; }
};

// Sums of a group before its first product.
template <int P, int kRows>
RL_INLINE void start_sums(const WinogradParams* params, bool has_shift, const int32_t* row_sums,
                          Vi (&sum)[kRows][P]) {
  RL_UNROLL for (int p = 0; p < P; ++p) {
    const Vi start = load_i(params[p * kWinogradBlocks].start);
    RL_UNROLL for (int r = 0; r < kRows; ++r) sum[r][p] = start;
  }
  if (!has_shift) return;
  RL_UNROLL for (int p = 0; p < P; ++p) {
    const Vi zero = load_i(params[p * kWinogradBlocks].zero);
    const Vi shift = _mm512_sub_epi32(set_i(WinogradInt4::kMiddle), zero);
    RL_UNROLL for (int r = 0; r < kRows; ++r) sum[r][p] =
        add_i(sum[r][p], mul_i(shift, set_i(row_sums[r])));
  }
}

// Adds the minima to the partial results [kRows][P * 16].
template <int P, int kRows>
RL_INLINE void add_mins(const WinogradParams* params, const WinogradRow& rows, float* partial) {
  RL_UNROLL for (int p = 0; p < P; ++p) {
    const Vf min = load_f(params[p * kWinogradBlocks].min);
    RL_UNROLL for (int r = 0; r < kRows; ++r) {
      float* y = partial + (r * P + p) * kPanel;
      const Vf row_sum = set_f(static_cast<float>(rows.sums[r]) * rows.scales[r]);
      store_f(y, fma_f(min, row_sum, load_f(y)));
    }
  }
}

// Where a tile stands.
struct WinogradCursor {
  const uint8_t *x, *at, *prefetch;
  const uint8_t* plain;      // nibbles of the block's plain line
  const uint8_t* last_line;  // of those that are decoded in registers
  int64_t step, panel_bytes, block_bytes;
  const uint8_t* next_line() { return at = at < last_line ? at + kLineBytes : at; }
  template <int P, bool kDirect>
  RL_INLINE void prefetch_weights() {
    RL_UNROLL for (int p = 0; p < P; ++p) __builtin_prefetch(prefetch + p * panel_bytes, 0, 2);
    constexpr int kBack = (kWinogradPrefetch - kWinogradNearPrefetch) * kLineBytes;
    if (kDirect) __builtin_prefetch(prefetch - kBack, 0, 3);
    prefetch += step;
  }
  // Of many rows, those of blocks to come: they are too far apart for the CPU's own prefetcher.
  template <int kRows>
  RL_INLINE void prefetch_rows() const {
    RL_UNROLL for (int r = 0; r < kRows; r += 2)
        __builtin_prefetch(x + kWinogradPrefetchBlocks * block_bytes + r * kBlock, 0, 3);
  }
};

// Ends sum `i` of [kRows][P]: scales it onto its partial result.
template <int P, int kRows, bool kDirect>
RL_INLINE void end_sum(int i, const Vi (&sum)[kRows][P], Vi weight_term, const Vf (&scale)[P],
                       const WinogradRow& rows, float* partial) {
  const Vi one = sum[i / P][i % P];
  ordered_scale_sum(kDirect ? _mm512_sub_epi32(one, weight_term) : one, scale[i % P],
                    rows.offsets + i / P, rows.scales + i / P, partial + i * kPanel);
}

// The weights that tiles multiply, of P panels: the next pairs' nibbles; low and high ones of a
// block's plain line (decoded beforehand: the vector in use); and C so far.
template <int P>
struct WinogradWeights {
  Vi mask, low[P], high[P], plain[2], weight_term;
};

// How many of a plain line's 2 * P * kRows products have been issued after a given number of the
// 3 * P * kRows sums of pairs: all of them a quarter of a line before its end, when the next block's plain
// line is decoded.
template <int P, int kRows>
constexpr int plain_products(int sums) {
  const int most = 2 * P * kRows, issued = sums * most / (3 * P * kRows - P * kRows / 4);
  return issued < most ? issued : most;
}

// A sum is complete this many products after its last one.
template <int P, int kRows>
constexpr int kLatency = P * kRows < 4 ? P * kRows : 4;

// Product `i` of the plain line, of [half][P][kRows].
template <int P, int kRows, bool kDirect>
RL_INLINE void plain_product(int i, const WinogradCursor& cursor, WinogradWeights<P>& w,
                             Vi (&sum)[kRows][P]) {
  const int half = i / (P * kRows), p = i / kRows % P, r = i % kRows;
  Vi& weights = w.plain[kDirect ? half : 0];
  if (!kDirect && r == 0)
    weights = ordered_load(cursor.plain + p * kDecodedPanelBytes + half * kLineBytes);
  sum[r][p] = ordered_dot_memory(sum[r][p], weights, cursor.x + r * kBlock + half * 4);
}

// Whether no sum [kRows][P] ends before its last product of the plain line.
template <int P, int kRows>
constexpr bool ends_after_plain_products() {
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < kRows; ++r) {
      const int issued = plain_products<P, kRows>(2 * P * kRows + r * P + p + kLatency<P, kRows>);
      if (issued <= P * kRows + p * kRows + r) return false;
    }
  return true;
}

// Line `l` of a block, 1 .. 3: its sums of pairs, and between them a share of the plain line's
// products; with kLast, a group's last line, the ends of the sums too. kDirect: the next line is
// decoded on the way, and with a block's last one the next block's plain line.
template <int P, int kRows, bool kDirect, bool kLast>
RL_INLINE void multiply_pair_line(int l, WinogradCursor& cursor, WinogradWeights<P>& w,
                                  const WinogradParams* params, const WinogradRow& rows,
                                  Vi (&sum)[kRows][P], float* partial) {
  static_assert(ends_after_plain_products<P, kRows>(), "sums end too soon");
  constexpr int kSums = P * kRows, kLate = kLatency<P, kRows>;
  const bool last = l == kBlockLines - 1;
  Vi low[P], high[P], line = w.mask, plain = w.mask;
  Vf scale[P];
  cursor.prefetch_weights<P, kDirect>();
  RL_UNROLL for (int p = 0; p < P; ++p) {
    low[p] = kDirect ? w.low[p] : ordered_load(cursor.at + p * kDecodedPanelBytes);
    high[p] = kDirect ? w.high[p] : ordered_load(cursor.at + p * kDecodedPanelBytes + kLineBytes);
    if (kLast) scale[p] = load_f(params[p * kWinogradBlocks].scale);
  }
  if constexpr (kDirect) {
    if (last) plain = ordered_load(cursor.next_line());
    line = ordered_load(cursor.next_line());
    w.weight_term = add_weight_term(w.weight_term, low[0], high[0]);
  } else {
    cursor.at += 2 * kLineBytes;
  }
  RL_UNROLL for (int r = 0; r < kRows; ++r) {
    const uint8_t* eight = cursor.x + r * kBlock + l * 8;
    const Vi first = ordered_broadcast(eight), second = ordered_broadcast(eight + 4);
    RL_UNROLL for (int p = 0; p < P; ++p) {
      const int i = r * P + p, sums = (l - 1) * kSums + i;
      sum[r][p] = dot_of_sums(sum[r][p], first, second, low[p], high[p]);
      if (kLast && i >= kLate)
        end_sum<P, kRows, kDirect>(i - kLate, sum, w.weight_term, scale, rows, partial);
      for (int j = plain_products<P, kRows>(sums); j < plain_products<P, kRows>(sums + 1); ++j)
        plain_product<P, kRows, kDirect>(j, cursor, w, sum);
    }
    if constexpr (!kDirect) continue;
    if (r == kRows / 4) w.high[0] = ordered_shift_4(line);
    if (r == kRows / 2) w.high[0] = ordered_and(w.high[0], w.mask);
    if (r == kRows * 5 / 8) w.low[0] = ordered_and(line, w.mask);
    if (last && r == kRows * 3 / 4) w.plain[1] = ordered_shift_4(plain);
    if (last && r == kRows * 7 / 8) w.plain[1] = ordered_and(w.plain[1], w.mask);
    if (last && r == kRows - 1) w.plain[0] = ordered_and(plain, w.mask);
  }
  RL_UNROLL for (int i = kSums - kLate; kLast && i < kSums; ++i)
      end_sum<P, kRows, kDirect>(i, sum, w.weight_term, scale, rows, partial);
}

template <int P, int kRows, bool kDirect, bool kLast>
RL_INLINE void multiply_pair_block(WinogradCursor& cursor, WinogradWeights<P>& w,
                                   const WinogradParams* params, const WinogradRow& rows,
                                   Vi (&sum)[kRows][P], float* partial) {
  cursor.prefetch_weights<P, kDirect>();
  if (!kDirect) cursor.prefetch_rows<kRows>();
  cursor.plain = cursor.at;
  if (!kDirect) cursor.at += 2 * kLineBytes;
  RL_UNROLL for (int l = 1; l < kBlockLines - 1; ++l)
      multiply_pair_line<P, kRows, kDirect, false>(l, cursor, w, params, rows, sum, partial);
  multiply_pair_line<P, kRows, kDirect, kLast>(kBlockLines - 1, cursor, w, params, rows, sum,
                                               kLast ? launder(partial) : partial);
}

// A chunk times kRows rows, onto their partial results [kRows][P * 16].
template <int P, int kRows, bool kDirect>
RL_NOINLINE void multiply_pair_rows(const WinogradChunk& c, int row, float* partial) {
  const LinearArgs& a = c.a;
  const bool has_mins = a.weight.mins, has_shift = has_mins || a.weight.zeros;
  const int per_group = a.weight.group / kBlock;
  const int64_t num_rows = a.num_rows, block_bytes = num_rows * kBlock;
  const int64_t from = c.group * num_rows + row;
  const int64_t num_lines = static_cast<int64_t>(c.num_groups) * per_group * kBlockLines;
  const uint8_t* last_line = c.at + (num_lines - 1) * kLineBytes;
  WinogradCursor cursor = {c.x + static_cast<int64_t>(row) * kBlock,
                           c.at,
                           c.prefetch,
                           c.at,
                           last_line,
                           c.step,
                           a.weight.panel_bytes(),
                           block_bytes};
  WinogradRow rows = {a.sums + from, a.scales + from, a.pair_offsets + from, num_rows};
  Vi sum[kRows][P];
  WinogradWeights<P> w;
  w.mask = _mm512_set1_epi8(15);
  if constexpr (kDirect) {
    const Vi plain = ordered_load(cursor.at), line = ordered_load(cursor.next_line());
    w.plain[0] = ordered_and(plain, w.mask);
    w.plain[1] = ordered_and(ordered_shift_4(plain), w.mask);
    w.low[0] = ordered_and(line, w.mask);
    w.high[0] = ordered_and(ordered_shift_4(line), w.mask);
  }
  const WinogradParams* const end = c.params + c.num_groups;
  for (const WinogradParams* params = c.params; params < end; ++params, rows.next_group()) {
    start_sums<P, kRows>(params, has_shift, rows.sums, sum);
    w.weight_term = set_i(0);
    for (int b = 1; b < per_group; ++b, cursor.x += block_bytes)
      multiply_pair_block<P, kRows, kDirect, false>(cursor, w, params, rows, sum, partial);
    multiply_pair_block<P, kRows, kDirect, true>(cursor, w, params, rows, sum, partial);
    cursor.x += block_bytes;
    if (has_mins) add_mins<P, kRows>(params, rows, launder(partial));
  }
}

template <int P, int kRows, bool kDirect>
void multiply_pair_tile(const WinogradChunk& c, int row, int num_rows, float* partial) {
  if (num_rows == kRows) return multiply_pair_rows<P, kRows, kDirect>(c, row, partial);
  if constexpr (kRows > 1) multiply_pair_tile<P, kRows - 1, kDirect>(c, row, num_rows, partial);
}

// P panels times rows first_row .. first_row + num_rows - 1, at most kRowBlock.
template <int P, int kRows, bool kDirect>
void multiply_pair_panels(const LinearArgs& a, int panel, int first_row, int num_rows) {
  constexpr int kBlocks = kDirect ? kWinogradFewRowBlocks : kWinogradBlocks;
  alignas(64) float partial[kRowBlock * P * kPanel];
  alignas(64) uint8_t decoded[kDirect ? 1 : P * kDecodedPanelBytes];
  alignas(64) WinogradParams params[P * kBlocks];
  const PackedWeight& w = a.weight;
  const int per_group = w.group / kBlock, blocks = w.padded_in() / kBlock;
  const int most = kBlocks / per_group * per_group;
  const int num_tiles = (num_rows + kRows - 1) / kRows;
  const uint8_t* line = w.lines + panel * w.panel_bytes();
  for (int r = 0; r < num_rows; ++r)
    WinogradInt4::clear<P>(a, first_row + r, partial + r * P * kPanel);
  for (int b = 0; b < blocks; b += most) {
    const int count = blocks - b < most ? blocks - b : most;
    const int64_t bytes = int64_t{count} * kBlockLines * kLineBytes;
    for (int p = 0; p < P; ++p) {
      load_winograd_params(w, panel + p, b / per_group, count / per_group, params + p * kBlocks);
      if constexpr (!kDirect)
        decode_winograd(line + p * w.panel_bytes(), count, per_group,
                        decoded + p * kDecodedPanelBytes, params + p * kBlocks);
    }
    WinogradChunk c = {a,
                       b / per_group,
                       count / per_group,
                       params,
                       kDirect ? line : decoded,
                       static_cast<const uint8_t*>(a.x) + int64_t{b} * a.num_rows * kBlock,
                       nullptr,
                       (kLineBytes + num_tiles - 1) / num_tiles};
    for (int t = 0, r = 0; t < num_tiles; ++t) {
      const int next = num_rows * (t + 1) / num_tiles;
      c.prefetch = num_tiles == 1 ? line + kWinogradPrefetch * kLineBytes
                                  : line + bytes + bytes * t / num_tiles;
      multiply_pair_tile<P, kRows, kDirect>(c, first_row + r, next - r, partial + r * P * kPanel);
      r = next;
    }
    line += bytes;
  }
  write_rows<WinogradInt4, P>(a, panel, first_row, num_rows, partial);
}

inline void multiply_int4_winograd(const LinearArgs& a, int first_panel, int end_panel) {
  for (int row = a.first_row; row < a.end_row; row += kRowBlock) {
    const int num_rows = a.end_row - row < kRowBlock ? a.end_row - row : kRowBlock;
    int p = first_panel;
    if (num_rows > kWinogradFewRows)
      for (; p + 2 <= end_panel; p += 2)
        multiply_pair_panels<2, kWinogradTileRows, false>(a, p, row, num_rows);
    for (; p < end_panel; ++p) multiply_pair_panels<1, kWinogradFewRows, true>(a, p, row, num_rows);
  }
}

// LinearOps::pair: adds 120 or subtracts 8, and computes P of each group into pair_offsets.
inline void pair_row(const QuantRows& rows, int row, int8_t* to) {
  const __m256i added = _mm256_set_epi32(-0x07070708, 0x78787878, -0x07070708, 0x78787878,
                                         -0x07070708, 0x78787878, 0, 0);  // bytes of 120 and -8
  const __m256i flip = _mm256_set1_epi8(-128), eights = _mm256_set1_epi8(8);
  for (int g = 0; g < rows.num_groups(); ++g) {
    // Sums of 8 * x over the plain line's eight bytes, and of (x0 + 128) * x1 over the other pairs;
    // between those stand products of (x1 + 128) * x0, which are dropped below.
    __m256i sums = _mm256_setzero_si256();
    for (int k = g * rows.group; k < (g + 1) * rows.group; k += kBlock) {
      const int64_t at = static_cast<int64_t>(k) * rows.num_rows + row * kBlock;
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.values + at));
      sums = _mm256_dpbusd_epi32(sums, _mm256_blend_epi32(_mm256_xor_si256(v, flip), eights, 3),
                                 _mm256_blend_epi32(_mm256_shuffle_epi32(v, 0xB1), v, 3));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), _mm256_add_epi8(v, added));
    }
    sums = _mm256_blend_epi32(sums, _mm256_setzero_si256(), 0xA8);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    rows.pair_offsets[static_cast<int64_t>(g) * rows.num_rows + row] =
        kIntegerOffset + static_cast<float>(_mm_cvtsi128_si32(s));
  }
}

}  // namespace
}  // namespace ridgeline
