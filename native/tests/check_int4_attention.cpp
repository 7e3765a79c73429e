// Conformance of attention over a cache in INT4 without Python: every variant of this build against
// plain loops in double over random codes and ranges; and the same rows bit for bit in pieces and
// on more threads. Memory is as large as it must be, so that sanitizers see a read beyond it.
#include <math.h>
#include <stdio.h>
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

double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return h & 0x8000 ? -size : size;
}

struct Shape {
  int heads, kv_heads, dim, window;
  float softcap;
  bool has_sinks;
  std::vector<std::pair<int, int>> runs;  // (computed, new)
};

// A step: each group of a run has a block in 4 bits and one in INT8.
struct Problem {
  Shape shape;
  std::vector<char> coded, recent;
  std::vector<float> q, sinks;
  std::vector<int32_t> row_start{0}, computed, table_start{0}, table;
  AttentionArgs args{};
  Int4Groups groups{};

  Problem(const Shape& s, const AttentionOps& ops) : shape(s) {
    for (auto [done, fresh] : s.runs) {
      row_start.push_back(row_start.back() + fresh);
      computed.push_back(done);
      table_start.push_back(table_start.back() + (done + fresh + kInt4Group - 1) / kInt4Group);
    }
    for (int i = 0; i < table_start.back(); ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), rng);
    const int64_t tile = int4_tile_bytes(s.dim), side = s.kv_heads * tile;
    const int64_t own_tile = kInt4Group * row_bytes(KvKind::kInt8, s.dim);
    const int64_t own_side = s.kv_heads * own_tile;
    coded.resize(table.size() * static_cast<size_t>(2 * side));
    recent.resize(table.size() * static_cast<size_t>(2 * own_side));
    for (size_t at = 0; at < coded.size(); at += static_cast<size_t>(tile)) fill_tile(&coded[at]);
    fill_recent(ops, own_tile);
    q.resize(static_cast<size_t>(row_start.back()) * s.heads * s.dim);
    for (float& x : q) x = normal();
    for (int head = 0; head < s.heads; ++head) sinks.push_back(normal());
    args = {q.data(),
            nullptr,
            recent.data(),
            recent.data() + own_side,
            KvKind::kInt8,
            s.heads * s.dim,
            s.dim,
            2 * own_side,
            own_tile,
            row_start.data(),
            computed.data(),
            table_start.data(),
            table.data(),
            static_cast<int>(computed.size()),
            s.heads,
            s.kv_heads,
            s.dim,
            kInt4Group,
            1.2f / sqrtf(static_cast<float>(s.dim)),
            s.window,
            s.softcap,
            1,
            s.has_sinks ? sinks.data() : nullptr};
    groups = {coded.data(), coded.data() + side, 2 * side, tile, table_start.data(), table.data()};
  }

  void fill_tile(char* tile) const {
    const int codes = kInt4Group * shape.dim / 2;
    for (int i = 0; i < codes; ++i) tile[i] = static_cast<char>(pick(0, 255));
    const int ranges = shape.dim;  // as many scales as mins
    for (int i = 0; i < 2 * ranges; ++i) {
      const bool is_scale = i < ranges;  // up to 0.25, and mins near -2
      const uint16_t h = static_cast<uint16_t>(is_scale ? pick(0, 0x3400) : pick(0xBC00, 0xC400));
      memcpy(tile + codes + 2 * i, &h, sizeof h);
    }
  }

  void fill_recent(const AttentionOps& ops, int64_t tile) {
    for (KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      std::vector<char*> blocks;
      std::vector<int32_t> within;
      for (size_t at = 0; at < recent.size(); at += static_cast<size_t>(tile)) {
        if ((at / static_cast<size_t>(tile * shape.kv_heads) % 2 == 1) != (side == KvSide::kValues))
          continue;
        for (int t = 0; t < kInt4Group; ++t) {
          blocks.push_back(&recent[at]);
          within.push_back(t);
        }
      }
      std::vector<float> x(blocks.size() * static_cast<size_t>(shape.dim));
      for (float& v : x) v = normal();
      ops.store_rows({x.data(), shape.dim, blocks.data(), within.data(),
                      static_cast<int>(blocks.size()), shape.dim, kInt4Group, KvKind::kInt8, side});
    }
  }

  // What is behind the last row of a run was never written.
  void poison() {
    for (size_t run = 0; run < computed.size(); ++run) {
      const int end = computed[run] + row_start[run + 1] - row_start[run];
      for (int at = end; at % kInt4Group; ++at) {
        const int32_t block = table[static_cast<size_t>(table_start[run] + at / kInt4Group)];
        for (int head = 0; head < shape.kv_heads; ++head)
          for (const char* base : {args.k, args.v})
            memset(recent.data() + (base - recent.data()) + block * args.stride_block +
                       head * args.stride_head + kInt4Group * shape.dim + 4 * (at % kInt4Group),
                   0xFF, 4);  // the scale
      }
    }
  }

  double number(KvSide side, int run, int position, bool is_recent, int head, int d) const {
    const int32_t block =
        table[static_cast<size_t>(table_start[static_cast<size_t>(run)] + position / kInt4Group)];
    const int D = shape.dim, t = position % kInt4Group;
    const bool keys = side == KvSide::kKeys;
    if (is_recent) {
      const char* tile =
          (keys ? args.k : args.v) + block * args.stride_block + head * args.stride_head;
      float scale;
      memcpy(&scale, tile + D * kInt4Group + 4 * t, sizeof scale);
      const int code = static_cast<uint8_t>(tile[code_offset(side, kInt4Group, D, t, d)]);
      return (code - 128) * static_cast<double>(scale);
    }
    const char* tile =
        (keys ? groups.k : groups.v) + block * groups.stride_block + head * groups.stride_head;
    const int order[] = {0, 4, 1, 5, 2, 6, 3, 7}, along = keys ? d : t;
    const int place = static_cast<int>(std::find(order, order + 8, along % 8) - order);
    const int word = keys ? along / 8 * kInt4Group + t : along / 8 * D + d;
    const int code = static_cast<uint8_t>(tile[4 * word + place % 4]) >> (place < 4 ? 0 : 4) & 15;
    const int range = keys ? d : d / kInt4Group * kInt4Group + t;
    uint16_t scale, least;
    memcpy(&scale, tile + kInt4Group * D / 2 + 2 * range, sizeof scale);
    memcpy(&least, tile + kInt4Group * D / 2 + 2 * (D + range), sizeof least);
    return code * half_value(scale) + half_value(least);
  }

  std::vector<double> reference(int run, int row, int head) const {
    const int position =
        computed[static_cast<size_t>(run)] + row - row_start[static_cast<size_t>(run)];
    const int low = shape.window ? std::max(0, position - shape.window + 1) : 0;
    const int from = head / (shape.heads / shape.kv_heads), D = shape.dim;
    const auto at = [&](KvSide side, int p, int d) {
      return number(side, run, p, p / kInt4Group == position / kInt4Group, from, d);
    };
    std::vector<double> score, out(static_cast<size_t>(D));
    for (int p = low; p <= position; ++p) {
      double s = 0;
      for (int d = 0; d < D; ++d)
        s += q[static_cast<size_t>((row * shape.heads + head) * D + d)] * at(KvSide::kKeys, p, d);
      s *= args.scale;
      score.push_back(shape.softcap > 0 ? shape.softcap * tanh(s / shape.softcap) : s);
    }
    const double top = *std::max_element(score.begin(), score.end());
    double sum = args.sinks ? exp(args.sinks[head] - top) : 0;
    for (int p = low; p <= position; ++p) {
      const double w = exp(score[static_cast<size_t>(p - low)] - top);
      sum += w;
      for (int d = 0; d < D; ++d) out[static_cast<size_t>(d)] += w * at(KvSide::kValues, p, d);
    }
    for (double& x : out) x /= sum;
    return out;
  }
};

void fail(const char* isa, const Shape& s, const char* what, double error) {
  if (++failures < 10)
    printf("%s heads %d/%d dim %d window %d cap %g: %s %g\n", isa, s.heads, s.kv_heads, s.dim,
           s.window, static_cast<double>(s.softcap), what, error);
}

// The rows, `size` of a run at a time, on `threads` threads.
std::vector<float> in_pieces(const AttentionOps& ops, const Problem& m, int size, int threads) {
  std::vector<float> out(m.q.size());
  const int64_t width = static_cast<int64_t>(m.shape.heads) * m.shape.dim;
  for (size_t run = 0; run < m.computed.size(); ++run)
    for (int first = m.row_start[run]; first < m.row_start[run + 1]; first += size) {
      const int32_t rows[2] = {0, std::min(size, m.row_start[run + 1] - first)};
      const int32_t done = m.computed[run] + first - m.row_start[run];
      AttentionArgs a = m.args;
      Int4Groups groups = m.groups;
      a.q += first * width;
      a.out = out.data() + first * width;
      a.row_start = rows;
      a.computed = &done;
      a.table_start = groups.table_start = m.table_start.data() + run;
      a.num_runs = 1;
      a.num_threads = threads;
      ops.attend_int4(a, groups);
    }
  return out;
}

void check(const AttentionOps& ops, const Shape& shape) {
  Problem m(shape, ops);
  m.poison();
  std::vector<float> out(m.q.size());
  m.args.out = out.data();
  ops.attend_int4(m.args, m.groups);
  for (int run = 0; run < m.args.num_runs; ++run)
    for (int row = m.row_start[static_cast<size_t>(run)];
         row < m.row_start[static_cast<size_t>(run) + 1]; ++row)
      for (int head = 0; head < shape.heads; ++head) {
        const std::vector<double> want = m.reference(run, row, head);
        double error = 0, size = 0;
        for (int d = 0; d < shape.dim; ++d) {
          const double x = out[static_cast<size_t>((row * shape.heads + head) * shape.dim + d)] -
                           want[static_cast<size_t>(d)];
          error += x * x;
          size += want[static_cast<size_t>(d)] * want[static_cast<size_t>(d)];
        }
        if (!(sqrt(error / size) < 2e-3)) fail(ops.isa, shape, "error", sqrt(error / size));
      }
  for (auto [size, threads] : {std::pair(1, 1), std::pair(3, 2), std::pair(1000, 3)})
    if (in_pieces(ops, m, size, threads) != out) fail(ops.isa, shape, "differs in pieces of", size);
}

void check_all(const AttentionOps& ops) {
  const int dims[] = {32, 64, 96, 128, 256};
  for (int i = 0; i < 10; ++i) {
    const int kv_heads = pick(1, 2);
    check(ops, {kv_heads * pick(1, 5),
                kv_heads,
                dims[i % 5],
                pick(0, 2) ? 0 : pick(1, 90),
                pick(0, 2) ? 0 : 3.0f,
                pick(0, 1) == 1,
                {{pick(0, 70), pick(1, 20)}, {pick(500, 600), 1}, {0, pick(1, 3)}}});
  }
  check(ops, {4, 2, 64, 0, 0, false, {{1500, 1}, {63, 1}, {64, 1}, {31, 2}}});
  check(ops, {9, 3, 64, 0, 0, false, {{1000, 40}, {0, 70}}});
  check(ops, {2, 1, 64, 700, 0, true, {{1500, 1}, {1020, 6}}});
  printf("%s: INT4 checked, %d failure(s) so far\n", ops.isa, failures);
}

}  // namespace

int main() {
#ifdef RIDGELINE_EMULATED
  check_all(attention_ops_portable());
  check_all(attention_ops_avx512());
  check_all(attention_ops_avx512vnni());
#else
  each_attention_variant([](const AttentionVariant& v) {
    if (v.runs_here) check_all(v.ops());
  });
#endif
  return failures ? 1 : 0;
}
