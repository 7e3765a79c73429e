// Conformance of the linear kernels without Python: every variant of this build against plain loops
// in double, and bit for bit against the portable one. Run by `make check-native` (sanitizers, the
// variants that this CPU runs) and `make check-isa` (AVX-512 and VNNI emulated by SIMDe).
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "linear/linear.h"
#include "simd/dispatch.h"

using namespace ridgeline;

namespace {

std::mt19937 rng(1);
int failures = 0;
constexpr int kMaxReports = 10;  // failures described

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
float normal() { return std::normal_distribution<float>(0, 1)(rng); }

template <class T>
T* aligned(std::vector<T>& memory, size_t count) {
  memory.assign(count + 64, T{});
  const uintptr_t at = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
  return reinterpret_cast<T*>(at);
}

struct Case {
  WeightKind kind;
  int num_out, num_in, group;
  bool zeros, bias, extreme;
  bool mins = false;
  int per_span = 0;  // groups that share a scale; 0: none do
  int digits = 1;    // of the rows
};

struct TestWeight {
  PackedWeight w = {};
  std::vector<uint8_t> memory, zeros;
  std::vector<int8_t> steps, min_steps;
  std::vector<uint16_t> scales, mins;
  std::vector<float> factors, bias;
  std::vector<double> dense;  // [N, K]
};

float half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return h & 0x8000 ? -size : size;
}

bool is_int8(WeightKind kind) {
  return kind == WeightKind::kInt8 || kind == WeightKind::kInt8Sparse24;
}

// Sets at least two of every four inputs to zero.
void keep_two_of_four(const Case& c, std::vector<uint8_t>& q) {
  for (int n = 0; n < c.num_out; ++n)
    for (int k = 0; k < c.num_in; k += 4) {
      int mask = 0;
      for (int i = pick(2, 3); i > 0; --i) mask |= 1 << pick(0, 3);
      for (int left = 2, j = 0; j < 4 && k + j < c.num_in; ++j)
        if (!(mask >> j & 1) || left-- <= 0) q[static_cast<size_t>(n) * c.num_in + k + j] = 0;
    }
}

void fill(const Case& c, TestWeight& m) {
  PackedWeight& w = m.w;
  w.kind = c.kind;
  w.num_out = c.num_out;
  w.num_in = c.num_in;
  w.group = has_groups(c.kind) ? c.group : static_cast<int>(round_up(c.num_in, kBlock));
  w.span = c.per_span * w.group;
  w.digits = c.digits;
  uint8_t* lines = aligned(m.memory, static_cast<size_t>(w.num_panels() * w.panel_bytes()));
  const size_t each = static_cast<size_t>(w.num_panels()) * w.num_groups() * kPanel;
  m.scales.resize(static_cast<size_t>(w.num_panels()) * w.num_spans() * kPanel);
  m.mins.resize(m.scales.size());
  m.zeros.resize(each);
  m.steps.resize(each);
  m.min_steps.resize(each);
  m.factors.resize(static_cast<size_t>(w.num_panels()) * kPanel);
  m.bias.resize(c.num_out);
  for (uint16_t& s : m.scales) s = static_cast<uint16_t>(pick(0, 0x7BFF) | pick(0, 1) << 15);
  for (uint16_t& s : m.mins) s = static_cast<uint16_t>(pick(0, 0x4BFF) | pick(0, 1) << 15);
  for (uint8_t& z : m.zeros) z = static_cast<uint8_t>(pick(0, 15));
  for (auto* each_step : {&m.steps, &m.min_steps})
    for (int8_t& s : *each_step) s = static_cast<int8_t>(pick(-128, 127));
  for (float& f : m.factors) f = ldexpf(1, pick(-6, 2));
  for (float& b : m.bias) b = normal();
  m.dense.resize(static_cast<size_t>(c.num_out) * c.num_in);
  const size_t count = m.dense.size();
  std::vector<uint8_t> q(count * 4);
  for (size_t i = 0; i < count; ++i) {
    if (c.kind == WeightKind::kInt4)
      q[i] = static_cast<uint8_t>(c.extreme ? 15 * pick(0, 1) : pick(0, 15));
    if (c.kind == WeightKind::kInt8Groups)
      q[i] = static_cast<uint8_t>(
          static_cast<int8_t>(c.extreme ? (pick(0, 1) ? 127 : -128) : pick(-128, 127)));
    if (is_int8(c.kind))
      q[i] = static_cast<uint8_t>(
          static_cast<int8_t>(c.extreme ? (pick(0, 1) ? 127 : -127) : pick(-127, 127)));
    if (c.kind == WeightKind::kBf16) {
      const float x = normal();
      memcpy(&q[2 * i], reinterpret_cast<const char*>(&x) + 2, 2);
    }
    if (c.kind == WeightKind::kFp32) {
      const float x = c.extreme ? ldexpf(normal(), pick(-20, 20)) : normal();
      memcpy(&q[4 * i], &x, 4);
    }
  }
  if (c.kind == WeightKind::kInt8Sparse24) keep_two_of_four(c, q);
  pack_lines(w, q.data(), lines);
  w.lines = lines;
  if (has_groups(c.kind)) w.scales = m.scales.data();
  if (c.mins) w.mins = m.mins.data();
  if (c.per_span) w.steps = m.steps.data();
  if (c.per_span && c.mins) w.min_steps = m.min_steps.data();
  if (c.zeros) w.zeros = m.zeros.data();
  if (!takes_floats(c.kind)) w.factors = m.factors.data();
  if (c.bias) w.bias = m.bias.data();
  std::vector<float> row(c.num_in);
  for (int n = 0; n < c.num_out; ++n) {
    unpack_row(w, n, row.data());
    for (int k = 0; k < c.num_in; ++k) {
      const size_t i = static_cast<size_t>(n) * c.num_in + k;
      m.dense[i] = row[k];
      double expected = row[k], slack = 0;
      if (has_groups(c.kind)) {
        const int group = k / w.group, per = c.per_span ? c.per_span : 1;
        const size_t s =
            (static_cast<size_t>(n / kPanel) * w.num_groups() + group) * kPanel + n % kPanel;
        const size_t at =
            (static_cast<size_t>(n / kPanel) * w.num_spans() + group / per) * kPanel + n % kPanel;
        const int zero = c.kind == WeightKind::kInt8Groups || c.mins ? 0 : c.zeros ? m.zeros[s] : 8;
        const int whole = c.kind == WeightKind::kInt4 ? q[i] : static_cast<int8_t>(q[i]);
        expected = (whole - zero) * static_cast<double>(half_value(m.scales[at])) *
                   (c.per_span ? m.steps[s] : 1);
        const double low =
            c.mins ? static_cast<double>(half_value(m.mins[at])) * (c.per_span ? m.min_steps[s] : 1)
                   : 0;
        slack = 1e-6 * (fabs(expected) + fabs(low)) * m.factors[n];
        expected = (expected + low) * m.factors[n];
      } else if (is_int8(c.kind)) {
        expected = static_cast<int8_t>(q[i]) * static_cast<double>(m.factors[n]);
      } else if (c.kind == WeightKind::kFp32) {
        float kept;
        memcpy(&kept, &q[4 * i], 4);
        expected = kept;
      }
      if (fabs(expected - row[k]) > 1e-6 * fabs(expected) + slack) {
        printf("unpack_row is wrong at %d, %d: %g instead of %g\n", n, k, row[k], expected);
        ++failures;
        return;
      }
    }
  }
}

std::vector<float> product(const LinearOps& ops, const TestWeight& m, const std::vector<float>& x,
                           int num_rows, int num_threads, std::vector<double>* rounded) {
  const PackedWeight& w = m.w;
  std::vector<float> out(static_cast<size_t>(num_rows) * w.num_out, NAN);
  if (takes_floats(w.kind)) {
    linear_float(ops, w, x.data(), w.num_in, num_rows, out.data(), w.num_out, num_threads);
    rounded->assign(x.begin(), x.end());
    return out;
  }
  if (w.digits > 1) {
    linear_digits(ops, w, x.data(), w.num_in, num_rows, out.data(), w.num_out, num_threads);
    rounded->assign(x.begin(), x.end());
    return out;
  }
  QuantRows rows = {nullptr, nullptr, nullptr, num_rows, w.num_in, w.group, max_row_value(w.kind)};
  std::vector<int8_t> values(static_cast<size_t>(num_rows) * rows.padded_in());
  std::vector<float> scales(static_cast<size_t>(num_rows) * rows.num_groups());
  std::vector<int32_t> sums(scales.size());
  rows.values = values.data();
  rows.scales = scales.data();
  rows.sums = sums.data();
  quantise_rows(ops, x.data(), w.num_in, 0, rows, num_threads);
  linear_quantised(ops, w, rows, out.data(), w.num_out, num_threads);
  rounded->resize(x.size());
  const int block = block_of(w.group, ops.max_block);
  for (int r = 0; r < num_rows; ++r)
    for (int k = 0; k < w.num_in; ++k)
      (*rounded)[static_cast<size_t>(r) * w.num_in + k] =
          static_cast<double>(
              values[(static_cast<size_t>(k / block) * num_rows + r) * block + k % block]) *
          scales[static_cast<size_t>(k / w.group) * num_rows + r];
  return out;
}

// Some panels alone must give their part of the outputs.
void check_panels(const LinearOps& ops, const TestWeight& m, const std::vector<float>& x,
                  int num_rows, const std::vector<float>& all) {
  const PackedWeight& w = m.w;
  const int first = pick(0, w.num_panels() - 1), end = pick(first + 1, w.num_panels());
  TestWeight part;
  part.w = panels_of(w, first, end);
  std::vector<double> rounded;
  const std::vector<float> y = product(ops, part, x, num_rows, 1, &rounded);
  for (int r = 0; r < num_rows; ++r)
    if (memcmp(&y[static_cast<size_t>(r) * part.w.num_out],
               &all[static_cast<size_t>(r) * w.num_out + first * kPanel],
               sizeof(float) * part.w.num_out)) {
      if (++failures < kMaxReports)
        printf("%s: panels %d to %d of kind %d alone\n", ops.isa, first, end,
               static_cast<int>(w.kind));
      return;
    }
}

// Some of the rows alone must give what they give among all, and no other row may be written.
void check_rows(const LinearOps& ops, const TestWeight& m, const std::vector<float>& x,
                int num_rows, const std::vector<float>& all) {
  const PackedWeight& w = m.w;
  if (!takes_floats(w.kind)) return;
  std::vector<uint8_t> memory;
  uint8_t* rows =
      aligned(memory, static_cast<size_t>(ops.x_bytes(w.kind)) * num_rows * w.padded_in());
  for (int r = 0; r < num_rows; ++r)
    ops.arrange(w.kind, x.data() + static_cast<size_t>(r) * w.num_in, w.num_in, r, num_rows, rows);
  const int first = pick(0, num_rows - 1), end = pick(first + 1, num_rows);
  const size_t line = static_cast<size_t>(w.num_out);
  std::vector<float> out(line * (end - first + 2), 7.0f);  // a row before and one behind
  ops.multiply({w, rows, nullptr, nullptr, out.data() + line, w.num_out, num_rows, first, end}, 0,
               w.num_panels());
  bool same = !memcmp(&out[line], &all[line * first], sizeof(float) * line * (end - first));
  for (size_t i = 0; i < line; ++i)
    same = same && out[i] == 7.0f && out[line * (end - first + 1) + i] == 7.0f;
  if (!same && ++failures < kMaxReports)
    printf("%s: rows %d to %d of %d of kind %d alone\n", ops.isa, first, end, num_rows,
           static_cast<int>(w.kind));
}

// Checks sums against products in double, up to what float32 rounds and what several digits leave
// of a row's largest.
void check_sums(const LinearOps& ops, const Case& c, const TestWeight& m,
                const std::vector<double>& rounded, const std::vector<float>& truth, int num_rows) {
  for (int r = 0; r < num_rows; ++r) {
    double left = 0;
    for (int k = 0; c.digits > 1 && k < c.num_in; ++k)
      left = fmax(left, fabs(rounded[static_cast<size_t>(r) * c.num_in + k]));
    left *= pow(2.0 * max_row_value(c.kind), -c.digits);
    for (int n = 0; n < c.num_out; ++n) {
      double y = 0, size = 1e-30, weights = 0;
      for (int k = 0; k < c.num_in; ++k) {
        const double term = rounded[static_cast<size_t>(r) * c.num_in + k] *
                            m.dense[static_cast<size_t>(n) * c.num_in + k];
        y += term;
        size += fabs(term);
        weights += fabs(m.dense[static_cast<size_t>(n) * c.num_in + k]);
      }
      if (m.w.bias) y += m.w.bias[n];
      const float found = truth[static_cast<size_t>(r) * c.num_out + n];
      if (!(fabs(found - y) <= 2e-6 * size + 1e-6 + 1.001 * left * weights)) {
        if (++failures < kMaxReports)
          printf("%s kind %d: row %d output %d: %g, expected %g\n", ops.isa,
                 static_cast<int>(c.kind), r, n, found, y);
      }
    }
  }
}

void check(const Case& c, const std::vector<const LinearOps*>& variants, int num_rows) {
  TestWeight m;
  fill(c, m);
  std::vector<float> x(static_cast<size_t>(num_rows) * c.num_in);
  for (float& v : x) v = c.extreme ? (pick(0, 1) ? 1.0f : -1.0f) : normal();
  for (int r = 0; r < num_rows; r += 3)  // a row of zeros, and one far larger than its neighbours
    for (int k = 0; k < c.num_in; ++k)
      x[static_cast<size_t>(r) * c.num_in + k] *= r % 2 ? 1e6f : 0.0f;
  std::vector<double> rounded;
  const std::vector<float> truth = product(*variants[0], m, x, num_rows, 1, &rounded);
  check_sums(*variants[0], c, m, rounded, truth, num_rows);
  for (const LinearOps* ops : variants) {
    const bool other_order = ops->x_bytes(c.kind) == 6;  // bf16 by AMX tiles: another order of sums
    const std::vector<float> y = product(*ops, m, x, num_rows, 2, &rounded);
    if (other_order) check_sums(*ops, c, m, rounded, y, num_rows);
    const std::vector<float>& expected = other_order ? y : truth;
    if (memcmp(y.data(), expected.data(), y.size() * sizeof(float))) {
      if (++failures < kMaxReports)
        printf("%s differs from %s: kind %d, %d x %d, group %d, %d rows\n", ops->isa,
               variants[0]->isa, static_cast<int>(c.kind), c.num_out, c.num_in, c.group, num_rows);
    }
    check_panels(*ops, m, x, num_rows, expected);
    check_rows(*ops, m, x, num_rows, expected);
    for (int r = 0; r < num_rows; r += 5) {  // alone
      const size_t at = static_cast<size_t>(r) * c.num_in;
      const std::vector<float> one(x.begin() + static_cast<long>(at),
                                   x.begin() + static_cast<long>(at) + c.num_in);
      const std::vector<float> alone = product(*ops, m, one, 1, 1, &rounded);
      if (memcmp(alone.data(), expected.data() + static_cast<size_t>(r) * c.num_out,
                 alone.size() * sizeof(float))) {
        if (++failures < kMaxReports)
          printf("%s: row %d of %d alone has other bits\n", ops->isa, r, num_rows);
      }
    }
  }
}

// A row with a NaN or an infinity, as damaged weights make them, is NaN in every output; its
// neighbours keep their bits.
void check_not_finite(const Case& c, const std::vector<const LinearOps*>& variants) {
  TestWeight m;
  fill(c, m);
  const int num_rows = 5;
  std::vector<float> x(static_cast<size_t>(num_rows) * c.num_in);
  for (float& v : x) v = normal();
  std::vector<double> rounded;
  const std::vector<float> finite = product(*variants[0], m, x, num_rows, 1, &rounded);
  const float bad[] = {NAN, INFINITY, -INFINITY};
  for (int r = 1; r < 4; ++r)
    x[static_cast<size_t>(r) * c.num_in + pick(0, c.num_in - 1)] = bad[r - 1];
  for (const LinearOps* ops : variants) {
    const std::vector<float> y = product(*ops, m, x, num_rows, 2, &rounded);
    for (int r = 0; r < num_rows; ++r)
      for (int n = 0; n < c.num_out; ++n) {
        const size_t i = static_cast<size_t>(r) * c.num_out + n;
        if ((r % 4 == 0 ? y[i] == finite[i] : isnan(y[i])) || ++failures >= kMaxReports) continue;
        printf("%s kind %d: row %d of rows that are not finite, output %d: %g\n", ops->isa,
               static_cast<int>(c.kind), r, n, y[i]);
      }
  }
}

}  // namespace

int main() {
  std::vector<const LinearOps*> variants = {&linear_ops_portable()};
#if defined(RIDGELINE_EMULATED)
  variants.push_back(&linear_ops_avx512());
  variants.push_back(&linear_ops_avx512vnni());
  variants.push_back(&linear_ops_avx512pairs());
  variants.push_back(&linear_ops_avx512amx());
#elif defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    variants.push_back(&linear_ops_avx2());
    if (__builtin_cpu_supports("avxvnni")) variants.push_back(&linear_ops_avxvnni());
  }
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    variants.push_back(&linear_ops_avx512());
    if (__builtin_cpu_supports("avx512vnni")) variants.push_back(&linear_ops_avx512vnni());
    if (__builtin_cpu_supports("avx512vnni")) variants.push_back(&linear_ops_avx512pairs());
    if (__builtin_cpu_supports("avx512vnni") && has_amx())
      variants.push_back(&linear_ops_avx512amx());
  }
#endif
#if defined(RIDGELINE_EMULATED)  // a hundred times slower: fewer, but every path of the kernels
  const int sizes[][2] = {{5, 7}, {48, 64}, {33, 257}};
  const std::vector<int> rows = {1, 2, 4, 5, 9, 13, 40, 100};
#else
  const int sizes[][2] = {{1, 1},    {5, 7},     {16, 32},  {48, 64},
                          {33, 257}, {130, 129}, {64, 704}, {17, 4200}};
  const std::vector<int> rows = {1, 2, 3, 4, 5, 7, 9, 12, 13, 16, 17, 29, 48, 100, 140};
#endif
  int cases = 0;
  for (const auto& size : sizes) {
    for (int num_rows : rows) {
      if (size[1] > 4096 && num_rows != 1 && num_rows != 100)
        continue;  // long rows only test that rows are cut
      for (bool extreme : {false, true}) {
        for (int group : {32, 64, 128})
          for (bool zeros : {false, true})
            check({WeightKind::kInt4, size[0], size[1], group, zeros, zeros, extreme}, variants,
                  num_rows),
                ++cases;
        for (int group : {16, 32, 64, 128})
          for (bool mins : {false, true})
            for (int per_span : {0, 2}) {
              const auto kind = group == 128 && mins ? WeightKind::kInt4 : WeightKind::kInt8Groups;
              check({kind, size[0], size[1], group, false, mins, extreme, mins, per_span}, variants,
                    num_rows),
                  ++cases;
            }
        check({WeightKind::kInt4, size[0], size[1], 32, false, true, extreme, true, 8}, variants,
              num_rows),
            ++cases;
        for (WeightKind kind : {WeightKind::kInt8, WeightKind::kInt8Sparse24})
          check({kind, size[0], size[1], 0, false, extreme, extreme}, variants, num_rows), ++cases;
        for (int digits : {2, 3}) {
          const int group = digits == 2 ? 32 : 128, small = digits == 2 ? 16 : 64;
          check(
              {WeightKind::kInt4, size[0], size[1], group, extreme, true, false, false, 0, digits},
              variants, num_rows),
              ++cases;
          for (WeightKind kind : {WeightKind::kInt8, WeightKind::kInt8Sparse24})
            check({kind, size[0], size[1], 0, false, extreme, extreme, false, 0, digits}, variants,
                  num_rows),
                ++cases;
          check({WeightKind::kInt8Groups, size[0], size[1], small, false, true, false, extreme, 2,
                 digits},
                variants, num_rows),
              ++cases;
        }
        for (WeightKind kind : {WeightKind::kBf16, WeightKind::kFp32})
          check({kind, size[0], size[1], 0, false, extreme, extreme}, variants, num_rows), ++cases;
      }
    }
  }
  for (const auto& size : sizes)
    for (int digits : {1, 2}) {
      check_not_finite(
          {WeightKind::kInt4, size[0], size[1], 32, true, true, false, false, 0, digits}, variants);
      for (WeightKind kind : {WeightKind::kInt8, WeightKind::kInt8Sparse24})
        check_not_finite({kind, size[0], size[1], 0, false, true, false, false, 0, digits},
                         variants);
      for (WeightKind kind : {WeightKind::kInt4, WeightKind::kInt8Groups})
        check_not_finite({kind, size[0], size[1], 32, false, true, false, true, 2, digits},
                         variants);
      cases += 5;
    }
  printf("%d cases, variants:", cases);
  for (const LinearOps* ops : variants) printf(" %s", ops->isa);
  printf(", %d failures\n", failures);
  return failures ? 1 : 0;
}
