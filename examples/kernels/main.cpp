// gated_ffn check: compares every level with a reference in double; exits 1 on a mismatch.
// gated_ffn bench [rows inputs outputs rounds]: median time of each level, levels in turns.
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "gated_ffn.h"

namespace {

const char* const kNames[] = {"plain", "vectorised", "parallel", "tiled", "fused"};
constexpr int kNumLevels = 5;

struct Problem {
  std::vector<float> x, g, u, h, gate, up;
  GatedFfn args;

  Problem(int rows, int in, int out, int threads) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& v, size_t count, float size) {
      v.resize(count);
      for (float& value : v) value = size * normal(rng);
    };
    const size_t weights = static_cast<size_t>(out) * in, results = static_cast<size_t>(rows) * out;
    fill(x, static_cast<size_t>(rows) * in, 1.0f);
    fill(g, weights, 1.0f / sqrtf(static_cast<float>(in)));
    fill(u, weights, 1.0f / sqrtf(static_cast<float>(in)));
    h.resize(results);
    gate.resize(results);
    up.resize(results);
    args = {x.data(), g.data(), u.data(), h.data(), gate.data(), up.data(), rows, in, out, threads};
  }

  double reference(int row, int out) const {
    double gate_sum = 0, up_sum = 0;
    for (int k = 0; k < args.num_in; ++k) {
      const double value = x[static_cast<size_t>(row) * args.num_in + k];
      gate_sum += value * g[static_cast<size_t>(out) * args.num_in + k];
      up_sum += value * u[static_cast<size_t>(out) * args.num_in + k];
    }
    return gate_sum / (1 + exp(-gate_sum)) * up_sum;
  }
};

int check() {
  const int sizes[][3] = {{1, 1, 1}, {3, 37, 5}, {4, 64, 6}, {41, 130, 9}};
  int failures = 0, checks = 0;
  for (const auto& size : sizes)
    for (int level = 0; level < kNumLevels; ++level, ++checks) {
      Problem p(size[0], size[1], size[2], 2);
      gated_ffn(static_cast<Level>(level), p.args);
      double worst = 0;
      for (int r = 0; r < size[0]; ++r)
        for (int o = 0; o < size[2]; ++o) {
          const double expected = p.reference(r, o);
          const double error = fabs(p.h[static_cast<size_t>(r) * size[2] + o] - expected);
          worst = fmax(worst, error / (1 + fabs(expected)));
        }
      if (!(worst < 1e-4)) {
        ++failures;
        printf("%s, %d x %d x %d: error %g\n", kNames[level], size[0], size[1], size[2], worst);
      }
    }
  printf("gated_ffn: %d checks, %d failures\n", checks, failures);
  return failures != 0;
}

void bench(int rows, int in, int out, int rounds) {
  Problem p(rows, in, out, omp_get_max_threads());
  std::vector<std::vector<double>> seconds(kNumLevels);
  for (int round = 0; round < rounds; ++round)
    for (int level = 0; level < kNumLevels; ++level) {
      const double begin = omp_get_wtime();
      gated_ffn(static_cast<Level>(level), p.args);
      seconds[level].push_back(omp_get_wtime() - begin);
    }
  printf("%d rows, %d inputs, 2 x %d outputs, %d threads, median of %d\n", rows, in, out,
         p.args.num_threads, rounds);
  double plain = 0, before = 0;
  for (int level = 0; level < kNumLevels; ++level) {
    std::sort(seconds[level].begin(), seconds[level].end());
    const double median = seconds[level][seconds[level].size() / 2];
    if (level == 0) plain = before = median;
    const double flops = 4.0 * rows * in * out;
    printf("  %-11s %9.3f ms %7.1f GFLOP/s %6.1f x plain %6.2f x the level above\n", kNames[level],
           1e3 * median, 1e-9 * flops / median, plain / median, before / median);
    before = median;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && !strcmp(argv[1], "check")) return check();
  if (argc >= 2 && !strcmp(argv[1], "bench")) {
    const auto option = [&](int at, int otherwise) { return argc > at ? atoi(argv[at]) : otherwise; };
    bench(option(2, 64), option(3, 2048), option(4, 5632), std::max(1, option(5, 5)));
    return 0;
  }
  fprintf(stderr, "usage: gated_ffn check | bench [rows inputs outputs rounds]\n");
  return 64;
}
