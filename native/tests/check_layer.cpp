// Conformance of the layer operators without Python: functions on rows against plain loops in
// double and bit for bit against the portable ones; drawing a token against a full sort; and a
// decoder layer's segment (add, norm, quantise, products, gate, rotate, store) against the same in
// double, with the same bits on any number of threads. Run by `make check-native` and, with the
// compiler's own vectors of 512 bits, `make check-isa`.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "layer/segment.h"
#include "sampling/draw.h"
#include "simd/dispatch.h"

using namespace ridgeline;
typedef std::vector<float> Floats;

namespace {

std::mt19937 rng(1);
int failures = 0;

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
Floats normal(int n, float size = 1) {
  Floats x(static_cast<size_t>(n));
  for (float& v : x) v = size * std::normal_distribution<float>(0, 1)(rng);
  return x;
}

void expect(bool ok, const char* isa, const char* what, int n) {
  if (!ok && ++failures < 20) printf("%s: %s of %d is wrong\n", isa, what, n);
}
void near(const Floats& found, const std::vector<double>& want, double slack, const char* isa,
          const char* what) {
  bool ok = found.size() == want.size();
  for (size_t i = 0; ok && i < found.size(); ++i)
    ok = fabs(found[i] - want[i]) <= slack * (0.1 + fabs(want[i]));
  expect(ok, isa, what, static_cast<int>(want.size()));
}
bool same(const Floats& a, const Floats& b) {
  return !memcmp(a.data(), b.data(), a.size() * sizeof(float));
}

double activated(Activation act, double x) {
  if (act == Activation::kSilu) return x / (1 + exp(-x));
  if (act == Activation::kGelu) return 0.5 * x * (1 + erf(x / sqrt(2.0)));
  return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// Applies every function of `ops` to rows of n; all results in one row.
Floats apply_all(const RowOps& ops, int n, const Floats& a, const Floats& b,
                 std::vector<double>& want) {
  Floats all, y = a;
  want.clear();
  const auto take = [&](const Floats& some) { all.insert(all.end(), some.begin(), some.end()); };
  double squares = 0;
  for (int i = 0; i < n; ++i) squares += static_cast<double>(a[i]) * a[i];
  ops.add(y.data(), b.data(), n);
  take(y);
  for (int i = 0; i < n; ++i) want.push_back(static_cast<double>(a[i]) + b[i]);
  const float by = ops.inverse_rms(a.data(), n, 1e-5f);
  take({by});
  want.push_back(1 / sqrt(squares / n + 1e-5));
  for (const float* gain : {b.data(), static_cast<const float*>(nullptr)}) {
    ops.scale(a.data(), by, gain, n, y.data());
    take(y);
    for (int i = 0; i < n; ++i)
      want.push_back(static_cast<double>(a[i]) * by * (gain ? gain[i] : 1));
  }
  for (Activation act : {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu}) {
    ops.gate(act, a.data(), b.data(), n, y.data());
    take(y);
    for (int i = 0; i < n; ++i) want.push_back(activated(act, a[i]) * b[i]);
  }
  const int rotated = n / 2 * 2, half = rotated / 2;
  y = a;
  ops.rotate(y.data(), b.data(), b.data() + 1, rotated);  // any numbers do as cosines and sines
  take(y);
  for (int i = 0; i < n; ++i) {
    const int other = i < half ? i + half : i - half;
    want.push_back(i < rotated
                       ? static_cast<double>(a[i]) * b[i] + static_cast<double>(a[other]) * b[i + 1]
                       : a[i]);
  }
  Floats weights(a.size());
  const float largest = *std::max_element(a.begin(), a.end());
  ops.softmax_weights(a.data(), largest, 0.7f, n, weights.data());
  take(weights);
  for (int i = 0; i < n; ++i) want.push_back(exp((static_cast<double>(a[i]) - largest) / 0.7f));
  std::vector<uint16_t> halves(a.size());
  for (int i = 0; i < n; ++i) {
    memcpy(&halves[i], reinterpret_cast<const char*>(&a[i]) + 2, 2);
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    want.push_back(wide * 3.0);
  }
  ops.widen_bf16(halves.data(), 3.0f, n, y.data());
  take(y);
  return all;
}

void check_largest(const RowOps& ops, int n) {
  Floats x(static_cast<size_t>(n));
  for (float& v : x) v = static_cast<float>(pick(-3, 3));  // ties
  const int64_t first = std::max_element(x.begin(), x.end()) - x.begin();
  expect(ops.argmax(x.data(), n) == first, ops.isa, "argmax", n);
  x[static_cast<size_t>(pick(0, n - 1))] = NAN;
  expect(ops.argmax(x.data(), n) == -1, ops.isa, "argmax with a NaN", n);
}

// The token to be drawn, by a full sort.
int64_t reference_draw(const Floats& x, const DrawArgs& a) {
  std::vector<int64_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t i, int64_t j) { return x[i] > x[j]; });
  std::vector<double> weight(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    weight[i] = exp((static_cast<double>(x[i]) - x[ids[0]]) / a.temperature);
  std::vector<int64_t> kept;
  for (int64_t id : ids)
    if (weight[id] >= a.min_p) kept.push_back(id);
  if (a.top_k > 0 && static_cast<size_t>(a.top_k) < kept.size())
    kept.resize(static_cast<size_t>(a.top_k));
  double total = 0, mass = 0;
  for (int64_t id : kept) total += weight[id];
  size_t some = 0;
  for (; some < kept.size() && (a.top_p >= 1 || mass < a.top_p * total); ++some)
    mass += weight[kept[some]];
  kept.resize(some);
  std::sort(kept.begin(), kept.end());
  double sum = 0;
  for (int64_t id : kept)
    if ((sum += weight[id]) > a.number * mass) return id;
  return kept.back();
}

void check_draw(const RowOps& ops) {
  for (int i = 0; i < 60; ++i) {
    const int n = pick(1, 300);
    const Floats x = normal(n, 3);
    const DrawArgs a = {0.5 + 0.1 * pick(0, 10), pick(0, 2) ? 0 : 0.01,
                        pick(0, 1) ? pick(1, 50) : 0, pick(0, 1) ? 0.05 + 0.1 * pick(0, 9) : 1.0,
                        0.001 + 0.01 * pick(0, 99)};
    expect(draw_token(ops, x.data(), n, a) == reference_draw(x, a), ops.isa, "draw_token", n);
  }
  const float none[] = {NAN, 1}, most[] = {INFINITY, 1};
  expect(draw_token(ops, none, 2, {1, 0, 0, 1, 0}) == -1, ops.isa, "draw_token with a NaN", 2);
  expect(draw_token(ops, most, 2, {1, 0, 0, 1, 0}) == -1, ops.isa, "draw_token with an infinity",
         2);
}

// A quantised weight: [N, K] packed, and as doubles.
struct Weight {
  PackedWeight packed = {};
  std::vector<uint8_t> memory;
  std::vector<uint16_t> scales;
  Floats factors;
  std::vector<double> dense;

  Weight(WeightKind kind, int num_out, int num_in)
      : factors(static_cast<size_t>(round_up(num_out, kPanel)), 0.01f) {
    const int group = kind == WeightKind::kInt4 ? 32 : static_cast<int>(round_up(num_in, kBlock));
    packed = {kind, nullptr, nullptr, nullptr, factors.data(), nullptr, num_out, num_in, group};
    const size_t lines = static_cast<size_t>(packed.num_panels() * packed.panel_bytes());
    memory.resize(lines + 64);
    uint8_t* at = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    scales.assign(static_cast<size_t>(packed.num_panels()) * packed.num_groups() * kPanel,
                  0x3C00);  // 1.0
    if (kind == WeightKind::kInt4) packed.scales = scales.data();
    std::vector<uint8_t> q(static_cast<size_t>(num_out) * num_in);
    for (uint8_t& v : q)
      v = static_cast<uint8_t>(kind == WeightKind::kInt4 ? pick(0, 15) : pick(-127, 127));
    pack_lines(packed, q.data(), at);
    packed.lines = at;
    for (uint8_t v : q)
      dense.push_back(
          0.01 * (kind == WeightKind::kInt4 ? v - 8 : static_cast<double>(static_cast<int8_t>(v))));
  }
  std::vector<double> times(const std::vector<double>& x_TK) const {
    std::vector<double> out;
    for (size_t t = 0; t < x_TK.size() / packed.num_in; ++t)
      for (int n = 0; n < packed.num_out; ++n) {
        double y = 0;
        for (int k = 0; k < packed.num_in; ++k)
          y += x_TK[t * packed.num_in + k] * dense[static_cast<size_t>(n) * packed.num_in + k];
        out.push_back(y);
      }
    return out;
  }
};

struct Variant {
  const LinearOps* linear;
  const RowOps* row;
  const AttentionOps* attention;
};

// The error of rows quantised to 8 bits, product after product: 3 % of the whole, with each further
// digit a two hundredth of that, until float32 rounds. Single rows may have more, so several layers
// are looked at together.
struct Rounding {
  const int digits;
  double error = 0, size = 0;

  void add(const Floats& found, const std::vector<double>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
      error += (found[i] - want[i]) * (found[i] - want[i]);
      size += want[i] * want[i];
    }
  }
  void check(const char* isa, int rows) const {
    const double share = digits == 1 ? 0.03 : digits == 2 ? 0.03 / 200 : 3e-6;
    expect(error < share * share * size, isa, "a segment's rounding, rows", rows);
  }
};

// T rows through add, norm, gate_up, silu·up, down, add, norm, qkv, rotate and store.
struct Layer {
  static constexpr int C = 70, D = 12, kQ = 3, kK = 2, kAllHeads = kQ + 2 * kK, B = 4;
  int T, I;
  Weight gate_up, down, qkv;
  Floats residual, branch, gain, heads_gain, table;
  std::vector<int64_t> positions;

  Layer(WeightKind kind, int rows, int inner, int digits)
      : T(rows),
        I(inner),
        gate_up(kind, 2 * I, C),
        down(kind, C, I),
        qkv(kind, kAllHeads * D, C),
        residual(normal(T * C)),
        branch(normal(T * C)),
        gain(normal(C)),
        heads_gain(normal(D)),
        table(normal(64 * 2 * D)) {
    for (int t = 0; t < T; ++t) positions.push_back((t + 3) % 60);
    for (Weight* each : {&gate_up, &down, &qkv}) each->packed.digits = digits;
  }

  // Residual, heads, cache.
  std::vector<Floats> run(const Variant& isa, KvKind kind, int threads) {
    const int64_t tile = B * row_bytes(kind, D), blocks = (T + 3) / B + 1;
    Floats cache(static_cast<size_t>((2 * tile * kK * blocks + 3) / 4));
    char* memory = reinterpret_cast<char*>(cache.data());
    const PagedKv kv = {memory, memory + kK * tile, kind, static_cast<int>(blocks), B, kK,
                        D,      2 * kK * tile,      tile};
    kv.check(static_cast<int64_t>(4 * cache.size()) - kK * tile);
    AttentionPlan plan;
    plan.num_blocks = static_cast<int>(blocks);
    plan.block_size = B;
    for (int b = static_cast<int>(blocks); b-- > 0;) plan.table.push_back(b);
    plan.add_run(3, T);
    Floats x = residual;
    Frame frame;
    frame.num_rows = T;
    frame.num_threads = threads;
    frame.linear = isa.linear;
    frame.row = isa.row;
    frame.positions = positions.data();
    frame.plans = {&plan};
    frame.ropes.push_back({table.data(), 64, D});
    frame.slots[kResidual] = x.data();
    frame.reserve(kBranch, C);
    memcpy(frame.slots[kBranch], branch.data(), branch.size() * sizeof(float));
    Segment segment;
    const auto add = [&](std::unique_ptr<Op> op) { segment.add(std::move(op)); };
    add(row_op({kResidual, C, true, nullptr, true, gain.data(), 1e-5f, &gate_up.packed, kOut}));
    const GatePlan gated = {&gate_up.packed, Activation::kSilu, I, &down.packed};
    add(gate_up_op(gated));
    add(gate_op(gated));
    add(linear_op(&down.packed, kBranch, true));
    add(row_op({kResidual, C, true, gain.data(), true, gain.data(), 1e-5f, &qkv.packed, kOut}));
    add(linear_op(&qkv.packed, kQkv, false));
    add(rope_op({kQ, kK, kAllHeads, D, 0, heads_gain.data(), heads_gain.data(), 1e-5f, &kv,
                 isa.attention}));
    segment.end_layer();
    segment.run(frame);
    const float* heads = frame.slots[kQkv];
    return {x, Floats(heads, heads + T * kAllHeads * D), cache};
  }

  static std::vector<double> normed(const std::vector<double>& x, const Floats& gain, int width) {
    std::vector<double> y;
    for (size_t at = 0; at < x.size(); at += static_cast<size_t>(width)) {
      double squares = 0;
      for (int i = 0; i < width; ++i) squares += x[at + i] * x[at + i];
      for (int i = 0; i < width; ++i)
        y.push_back(x[at + i] / sqrt(squares / width + 1e-5) * gain[i]);
    }
    return y;
  }

  void check(const Variant& isa, KvKind kind, Rounding& rounding) {
    const std::vector<Floats> found = run(isa, kind, 1);
    for (int threads : {2, 3}) {
      const std::vector<Floats> again = run(isa, kind, threads);
      for (size_t i = 0; i < 3; ++i)
        expect(same(found[i], again[i]), isa.linear->isa, "a segment on several threads", T);
    }
    std::vector<double> x(residual.begin(), residual.end());
    for (size_t i = 0; i < x.size(); ++i) x[i] += branch[i];
    const std::vector<double> wide = gate_up.times(normed(x, gain, C));
    std::vector<double> gated;
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < I; ++i)
        gated.push_back(activated(Activation::kSilu, wide[t * 2 * I + i]) *
                        wide[t * 2 * I + I + i]);
    const std::vector<double> back = normed(down.times(gated), gain, C);
    for (size_t i = 0; i < x.size(); ++i) x[i] += back[i];
    rounding.add(found[0], x);
    std::vector<double> heads = qkv.times(normed(x, gain, C));
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < kQ + kK; ++h)
        rotate(&heads[(t * kAllHeads + h) * D], table.data() + positions[t] * 2 * D);
    rounding.add(found[1], heads);
    stored(isa, kind, found[1], found[2]);
  }

  void rotate(double* x, const float* cos) const {
    std::vector<double> y = normed({x, x + D}, heads_gain, D);
    for (int i = 0; i < D; ++i)
      x[i] = y[i] * cos[i] + y[i < D / 2 ? i + D / 2 : i - D / 2] * cos[D + i];
  }

  // The cache must hold exactly what store_rows makes of the heads.
  void stored(const Variant& isa, KvKind kind, const Floats& heads, const Floats& cache) {
    const int64_t tile = B * row_bytes(kind, D), blocks = (T + 3) / B + 1;
    Floats other(cache.size());
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < 2 * kK; ++h) {
        const int32_t within = (t + 3) % B;
        char* to = reinterpret_cast<char*>(other.data()) +
                   ((blocks - 1 - (t + 3) / B) * 2 * kK + h) * tile;
        isa.attention->store_rows({heads.data() + (t * kAllHeads + kQ + h) * D, D, &to, &within, 1,
                                   D, B, kind, h < kK ? KvSide::kKeys : KvSide::kValues});
      }
    expect(same(cache, other), isa.linear->isa, "the cache", T);
  }
};

void check(const Variant& isa) {
  for (int n : {1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 100, 1000}) {
    const Floats a = normal(n, 2), b = normal(n + 1);
    std::vector<double> want;
    const Floats found = apply_all(*isa.row, n, a, b, want);
    near(found, want, 1e-5, isa.row->isa, "a function on rows");
    expect(same(found, apply_all(row_ops_portable(), n, a, b, want)), isa.row->isa, "bits", n);
    check_largest(*isa.row, n);
  }
  check_draw(*isa.row);
  for (WeightKind weights : {WeightKind::kInt4, WeightKind::kInt8})
    for (KvKind kind : {KvKind::kFloat32, KvKind::kBfloat16, KvKind::kInt8})
      for (int rows : {1, 5, 60, 150})
        for (int digits : {1, 2, 3}) {
          if (digits > 1 && kind != KvKind::kFloat32) continue;
          Rounding rounding = {digits};
          // With more than one row and groups of 32, gating is fused; with 90 outputs it cannot be.
          for (int layer = 0; layer < 150 / rows; ++layer)
            Layer(weights, rows, layer % 2 ? 90 : 96, digits).check(isa, kind, rounding);
          rounding.check(isa.linear->isa, rows);
        }
  printf("%s: layer operators checked, %d failure(s) so far\n", isa.linear->isa, failures);
}

}  // namespace

int main() {
  check({&linear_ops_portable(), &row_ops_portable(), &attention_ops_portable()});
#if defined(RIDGELINE_EMULATED)
  check({&linear_ops_avx512(), &row_ops_avx512(), &attention_ops_avx512()});
#elif defined(__x86_64__)
  const bool narrow = best_isa() != Isa::kPortable && __builtin_cpu_supports("f16c");
  if (narrow) check({&linear_ops_avx2(), &row_ops_avx2(), &attention_ops_avx2()});
  if (best_isa() == Isa::kAvx512)
    check({&linear_ops_avx512(), &row_ops_avx512(), &attention_ops_avx512()});
#endif
  return failures ? 1 : 0;
}
