// Conformance of the attention kernels without Python: every variant of this build against plain
// loops in double, for every format of the cache; and the same rows bit for bit alone, chunked and
// on more threads. Run by `make check-native` (sanitizers, the variants that this CPU runs) and
// `make check-isa` (AVX-512 emulated by SIMDe).
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "attention/attention.h"
#ifndef RIDGELINE_EMULATED
#include "attention/variants.h"
#endif

using namespace ridgeline;

namespace {

std::mt19937 rng(1);
int failures = 0;

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
float normal() { return std::normal_distribution<float>(0, 1)(rng); }

struct Shape {
  KvKind kind;
  int heads, kv_heads, dim, block, window;
  float softcap;
  std::vector<std::pair<int, int>> runs;  // (computed, new)
  bool equal = false;                     // queries are zero, so that all keys have the same weight
};

float half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return h & 0x8000 ? -size : size;
}

// Dimension d of token t in a block; for int8, from where the comment of code_offset says it is.
double stored(KvKind kind, const char* tile, KvSide side, int B, int t, int d, int D) {
  const char* row = tile + t * row_bytes(kind, D);
  if (has_codes(kind)) {
    const int order[] = {0, 2, 1, 3}, last = side == KvSide::kKeys ? D % 4 : B % 4;
    int at;
    if (side == KvSide::kKeys)
      at = d < D - last ? (d / 4 * B + t) * 4 + d % 4 : (D - last) * B + t * last + d % 4;
    else
      at = t < B - last ? (t / 4 * D + d) * 4 + order[t % 4] : (B - last) * D + d * last + t % 4;
    float scale;
    memcpy(&scale, tile + D * B + 4 * t, sizeof scale);
    const int code = static_cast<uint8_t>(tile[at]);
    if (kind == KvKind::kInt8) return (code - 128) * static_cast<double>(scale);
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return (code & 128 ? -size : size) * static_cast<double>(scale);
  }
  if (kind == KvKind::kFloat32) {
    float x;
    memcpy(&x, row + 4 * d, sizeof x);
    return x;
  }
  uint16_t h;
  memcpy(&h, row + 2 * d, sizeof h);
  if (kind == KvKind::kFloat16) return half_value(h);
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A step over a cache that is exactly as large as it must be, its blocks in random order.
struct Problem {
  Shape shape;
  std::vector<char> kv;
  std::vector<int32_t> row_start{0}, computed, table_start{0}, table;
  std::vector<float> q;
  AttentionArgs args{};

  explicit Problem(const Shape& s) : shape(s) {
    int num_blocks = 0;
    for (auto [done, fresh] : s.runs) {
      num_blocks += (done + fresh + s.block - 1) / s.block;
      row_start.push_back(row_start.back() + fresh);
      computed.push_back(done);
      table_start.push_back(num_blocks);
    }
    for (int i = 0; i < num_blocks; ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), rng);
    const int64_t width = row_bytes(s.kind, s.dim), head = width * s.block;
    kv.resize(static_cast<size_t>(2 * head * s.kv_heads * num_blocks));
    q.resize(static_cast<size_t>(row_start.back()) * s.heads * s.dim);
    for (float& x : q) x = s.equal ? 0.0f : normal();
    args = {q.data(),
            nullptr,
            kv.data(),
            kv.data() + head * s.kv_heads,
            s.kind,
            s.heads * s.dim,
            s.dim,
            2 * head * s.kv_heads,
            head,
            row_start.data(),
            computed.data(),
            table_start.data(),
            table.data(),
            static_cast<int>(computed.size()),
            s.heads,
            s.kv_heads,
            s.dim,
            s.block,
            1.2f / sqrtf(static_cast<float>(s.dim)),
            s.window,
            s.softcap,
            1};
  }

  void fill(const AttentionOps& ops) {  // with the kernel's own rounding
    for (KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      std::vector<char*> blocks;
      std::vector<int32_t> within;
      char* base = kv.data() + (side == KvSide::kKeys ? 0 : args.v - args.k);
      for (size_t block = 0; block < table.size(); ++block)
        for (int row = 0; row < shape.kv_heads * shape.block; ++row) {
          blocks.push_back(base + static_cast<int64_t>(block) * args.stride_block +
                           row / shape.block * args.stride_head);
          within.push_back(row % shape.block);
        }
      std::vector<float> x(blocks.size() * static_cast<size_t>(shape.dim));
      for (float& v : x) v = normal();
      ops.store_rows({x.data(), shape.dim, blocks.data(), within.data(),
                      static_cast<int>(blocks.size()), shape.dim, shape.block, shape.kind, side});
      for (size_t i = 0; i < x.size(); ++i) {
        const size_t row = i / shape.dim;
        const int d = static_cast<int>(i % shape.dim);
        const double value =
            stored(shape.kind, blocks[row], side, shape.block, within[row], d, shape.dim);
        const double slack = shape.kind == KvKind::kFloat32 ? 0
                             : shape.kind == KvKind::kInt8  ? 0.03
                             : shape.kind == KvKind::kFp8   ? fabs(x[i]) / 15.9 + 1e-4
                                                            : 0.02;
        if (fabs(value - x[i]) > slack) ++failures;
      }
    }
  }

  // Writes NaN wherever no row of a run looks: before its window, behind its end.
  void poison() {
    for (size_t run = 0; run < computed.size(); ++run) {
      const int end = computed[run] + row_start[run + 1] - row_start[run];
      const int low = shape.window ? std::max(0, computed[run] - shape.window + 1) : 0;
      for (int at = 0; at < (table_start[run + 1] - table_start[run]) * shape.block; ++at) {
        if (at >= low && at < end) continue;
        const size_t bytes = static_cast<size_t>(row_bytes(shape.kind, shape.dim));
        const int32_t block = table[static_cast<size_t>(table_start[run] + at / shape.block)];
        for (int head = 0; head < shape.kv_heads; ++head) {
          const int64_t row = block * args.stride_block + head * args.stride_head +
                              at % shape.block * static_cast<int64_t>(bytes);
          memset(kv.data() + row, 0xFF, bytes);
          memset(kv.data() + (args.v - args.k) + row, 0xFF, bytes);
        }
      }
    }
  }

  double key_or_value(KvSide side, int run, int position, int head, int d) const {
    const int32_t block =
        table[static_cast<size_t>(table_start[static_cast<size_t>(run)] + position / shape.block)];
    const char* tile = (side == KvSide::kKeys ? args.k : args.v) + block * args.stride_block +
                       head * args.stride_head;
    return stored(shape.kind, tile, side, shape.block, position % shape.block, d, shape.dim);
  }

  // Dimension d of a query, rounded as kernels with `rounds` do.
  double query(int row, int head, int d, bool rounds) const {
    const float x = q[static_cast<size_t>((row * shape.heads + head) * shape.dim + d)];
    if (!rounds || shape.kind != KvKind::kBfloat16) return x;
    const float unit = shape.softcap > 0 ? args.scale : args.scale * 1.44269504f, scaled = x * unit;
    uint32_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    float rounded;
    memcpy(&rounded, &bits, sizeof rounded);
    return static_cast<double>(rounded) / static_cast<double>(unit);
  }

  // `sizes`: the results if all terms had the same sign.
  void reference(int run, int row, int head, bool rounds, std::vector<double>& out,
                 std::vector<double>& sizes) const {
    const int position =
        computed[static_cast<size_t>(run)] + row - row_start[static_cast<size_t>(run)];
    const int low =
        shape.window && position - shape.window + 1 > 0 ? position - shape.window + 1 : 0;
    const int from = head / (shape.heads / shape.kv_heads), D = shape.dim;
    std::vector<double> score;
    for (int p = low; p <= position; ++p) {
      double s = 0;
      for (int d = 0; d < D; ++d)
        s += query(row, head, d, rounds) * key_or_value(KvSide::kKeys, run, p, from, d);
      s *= args.scale;
      score.push_back(shape.softcap > 0 ? shape.softcap * tanh(s / shape.softcap) : s);
    }
    const double top = *std::max_element(score.begin(), score.end());
    double sum = 0;
    out.assign(static_cast<size_t>(D), 0);
    sizes.assign(static_cast<size_t>(D), 0);
    for (int p = low; p <= position; ++p) {
      const double w = exp(score[static_cast<size_t>(p - low)] - top);
      sum += w;
      for (int d = 0; d < D; ++d) {
        const double weighted = w * key_or_value(KvSide::kValues, run, p, from, d);
        out[static_cast<size_t>(d)] += weighted;
        sizes[static_cast<size_t>(d)] += fabs(weighted);
      }
    }
    for (double& x : out) x /= sum;
    for (double& x : sizes) x /= sum;
  }
};

void fail(const char* isa, const Shape& s, const char* what, double error) {
  if (++failures < 10)
    printf("%s kind %d heads %d/%d dim %d block %d window %d cap %g: %s %g\n", isa,
           static_cast<int>(s.kind), s.heads, s.kv_heads, s.dim, s.block, s.window,
           static_cast<double>(s.softcap), what, error);
}

void compare(const AttentionOps& ops, const Problem& m, const std::vector<float>& out) {
  const Shape& s = m.shape;
  // Weights in bfloat16 have errors of up to 2^-9, and so has their sum: each number of a result
  // has an error of up to 2^-8 of its `size`. Over more than two numbers the errors average to half
  // of that.
  const bool rounds = ops.rounds_to_bf16 && s.kind == KvKind::kBfloat16 && !s.equal;
  std::vector<double> want, sizes;
  for (int run = 0; run < m.args.num_runs; ++run)
    for (int row = m.row_start[static_cast<size_t>(run)];
         row < m.row_start[static_cast<size_t>(run) + 1]; ++row)
      for (int head = 0; head < s.heads; ++head) {
        m.reference(run, row, head, ops.rounds_to_bf16, want, sizes);
        double error = 0, size = (rounds ? 0.3 : 0.01) * s.dim;  // values near 1 may cancel
        for (int d = 0; d < s.dim; ++d) {
          const double x = out[static_cast<size_t>((row * s.heads + head) * s.dim + d)] -
                           want[static_cast<size_t>(d)];
          error += x * x;
          size += want[static_cast<size_t>(d)] * want[static_cast<size_t>(d)];
          const double of_size = fabs(x) / sizes[static_cast<size_t>(d)];
          if (rounds && !(of_size < 1.0 / 256 + 5e-4))
            fail(ops.isa, s, "a number's error", of_size);
        }
        const double limit = rounds ? 2e-3 : s.kind == KvKind::kInt8 ? 5e-4 : 1e-5;
        if (!(rounds && s.dim <= 2) && !(sqrt(error / size) < limit))
          fail(ops.isa, s, "error", sqrt(error / size));
      }
}

// The same rows, `size` of a run at a time, on `threads` threads.
std::vector<float> in_pieces(const AttentionOps& ops, Problem& m, int size, int threads) {
  std::vector<float> out(m.q.size());
  const int64_t width = static_cast<int64_t>(m.shape.heads) * m.shape.dim;
  for (size_t run = 0; run < m.computed.size(); ++run)
    for (int first = m.row_start[run]; first < m.row_start[run + 1]; first += size) {
      const int32_t rows[2] = {0, std::min(size, m.row_start[run + 1] - first)};
      const int32_t done = m.computed[run] + first - m.row_start[run];
      AttentionArgs a = m.args;
      a.q += first * width;
      a.out = out.data() + first * width;
      a.row_start = rows;
      a.computed = &done;
      a.table_start = m.table_start.data() + run;
      a.num_runs = 1;
      a.num_threads = threads;
      ops.attend(a);
    }
  return out;
}

// What a caller with threads of its own does: units in any order, then merges, partials placed
// late.
struct TestAllocator {
  std::vector<char> bytes[3];
  static void* allocate(void* owner, AttentionBuffer buffer, int64_t size) {
    if (buffer == AttentionBuffer::kPartials) return nullptr;
    auto& held = static_cast<TestAllocator*>(owner)->bytes[static_cast<int>(buffer)];
    held.resize(static_cast<size_t>(size));
    return held.data();
  }
};

std::vector<float> in_units(const AttentionOps& ops, const Problem& m, int threads) {
  std::vector<float> out(m.q.size());
  AttentionArgs a = m.args;
  a.num_threads = threads;
  TestAllocator allocator;
  AttentionWork work;
  ops.plan(a, {&allocator, TestAllocator::allocate}, work);
  std::vector<float> partials(static_cast<size_t>(work.num_floats));
  work.floats = partials.data();
  work.args.out = out.data();
  std::vector<int> order;
  for (int i = 0; i < work.num_units; ++i) order.push_back(i);
  std::shuffle(order.begin(), order.end(), rng);
  void* scratch = aligned_alloc(64, static_cast<size_t>((ops.scratch_bytes + 63) / 64 * 64));
  for (int unit : order) ops.run_unit(work, unit, scratch);
  for (int i = 0; i < work.num_merges; ++i) ops.merge_item(work, i, scratch);
  free(scratch);
  return out;
}

void check(const AttentionOps& ops, const Shape& shape) {
  Problem m(shape);
  m.fill(ops);
  if (!has_codes(shape.kind)) m.poison();  // codes and scales cannot be NaN
  std::vector<float> out(m.q.size());
  m.args.out = out.data();
  ops.attend(m.args);
  compare(ops, m, out);
  for (auto [size, threads] : {std::pair(1, 1), std::pair(3, 2), std::pair(1000, 3)})
    if (in_pieces(ops, m, size, threads) != out) fail(ops.isa, shape, "differs in pieces of", size);
  for (int threads : {1, 2, 5})
    if (in_units(ops, m, threads) != out)
      fail(ops.isa, shape, "differs in units for threads", threads);
}

// One long context among short ones is cut into chunks, so that threads need not wait for it; equal
// ones, several per thread, are not.
void check_cuts(const AttentionOps& ops) {
  for (int others : {40, 1500}) {
    Shape one_long = {
        KvKind::kInt8, 4, 2, 64, 16, 0, 0, std::vector<std::pair<int, int>>(8, {others, 1})};
    one_long.runs[3].first = 1500;
    Problem m(one_long);
    m.args.num_threads = 2;
    TestAllocator allocator;
    AttentionWork work;
    ops.plan(m.args, {&allocator, TestAllocator::allocate}, work);
    if ((work.num_units > work.num_items) != (others < 1500))
      fail(ops.isa, one_long, "units for its items", work.num_units);
  }
}

void check_all(const AttentionOps& ops) {
  const int dims[] = {1, 2, 6, 20, 64, 80, 96, 128, 256};
  for (KvKind kind : {KvKind::kFloat32, KvKind::kBfloat16, KvKind::kFloat16, KvKind::kInt8,
                      KvKind::kFp8})
    for (int i = 0; i < 18; ++i) {
      const int kv_heads = pick(1, 2), heads = kv_heads * pick(1, 5),
                block = pick(0, 1) ? 16 * pick(1, 3) : pick(1, 20);
      Shape s = {kind,
                 heads,
                 kv_heads,
                 dims[i % 9],
                 block,
                 pick(0, 2) ? 0 : pick(1, 90),
                 pick(0, 2) ? 0 : 3.0f,
                 {}};
      s.runs = {{pick(0, 70), pick(1, 20)}, {pick(500, 600), 1}, {0, pick(1, 3)}};
      check(ops, s);
    }
  check(ops, {KvKind::kInt8, 4, 2, 64, 16, 0, 0, {{1500, 1}}});
  check(ops,
        {KvKind::kBfloat16, 8, 1, 64, 16, 0, 0, {{70, 30}, {0, 40}}});  // many rows, some of which
                                                                        // see no key of a tile
  for (int window : {43, 61, 100})
    check(ops, {KvKind::kBfloat16, 8, 2, 96, 32, window, 0, {{130, 30}, {50, 1}, {131, 3}}});
  for (int dim :
       {64, 128, 256})  // many rows, and the same rows alone: tiles and vectors give the same sums
    for (int window : {0, 43})
      check(ops, {KvKind::kInt8,
                  8,
                  2,
                  dim,
                  16 * pick(1, 3),
                  window,
                  window ? 3.0f : 0,
                  {{70, 30}, {0, 9}, {530, 20}}});
  for (int rows : {1, 3, 30})  // equal weights are exact in bfloat16
    for (int window : {0, 43})
      check(ops, {KvKind::kBfloat16, 4, 2, 64, 16, window, 0, {{530, rows}, {0, rows}}, true});
  for (KvKind kind :
       {KvKind::kInt8, KvKind::kFp8, KvKind::kBfloat16})  // a long context among short ones, and with a prompt
    check(ops, {kind,
                4,
                2,
                64,
                16,
                0,
                0,
                {{30, 1}, {1500, 1}, {9, 1}, {40, 1}, {3, 70}, {20, 1}, {600, 1}, {31, 1}}});
  check_cuts(ops);
  check(ops, {KvKind::kBfloat16, 10, 5, 32, 16, 700, 0, {{1500, 1}, {3, 2}}});  // kv heads that
                                                                                // divide unevenly
  printf("%s: checked, %d failure(s) so far\n", ops.isa, failures);
}

}  // namespace

int main() {
#ifdef RIDGELINE_EMULATED
  check_all(attention_ops_portable());
  check_all(attention_ops_avx512());
  check_all(attention_ops_avx512vnni());
  check_all(attention_ops_avx512pairs());
  check_all(attention_ops_avx512amx());
#else
  each_attention_variant([](const AttentionVariant& v) {
    if (v.runs_here) check_all(v.ops());
  });
#endif
  return failures ? 1 : 0;
}
