// The scale search on every variant that this CPU runs, against doubles: rows and groups of odd
// sizes, memory that ends where the arguments say, and rows where no candidate is better.
#include <math.h>
#include <stdio.h>

#include <random>
#include <vector>

#include "quantize/scale_search.h"
#include "simd/dispatch.h"

using namespace ridgeline;

namespace {

struct Case {
  int rows, size, scales, zeros;
};

int failures = 0;

void fail(const char* isa, const Case& c, const char* what) {
  ++failures;
  printf("FAIL %s, %d rows of %d, %d scales, %d zeros: %s\n", isa, c.rows, c.size, c.scales,
         c.zeros, what);
}

struct Inputs {
  std::vector<float> weight, error, others, moment, scales, zeros;
  Inputs(const Case& c, long stride, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> even(0.1f, 0.4f);
    const int pitch = (c.size + 15) / 16 * 16;
    const size_t last = static_cast<size_t>(c.rows - 1) * stride + c.size;
    for (size_t i = 0; i < last; ++i) {
      weight.push_back(normal(rng));
      error.push_back((i / stride) % 3 ? 0.05f * normal(rng) : 1e-5f * normal(rng));
    }
    for (int i = 0; i < c.rows * c.size; ++i) others.push_back(normal(rng));
    for (int i = 0; i < c.rows * c.scales; ++i) scales.push_back(even(rng));
    for (int i = 0; i < c.rows * c.zeros; ++i) zeros.push_back(static_cast<float>(rng() % 16));
    std::vector<float> x(static_cast<size_t>(c.size) * 2 * c.size);
    for (float& v : x) v = normal(rng);
    moment.assign(static_cast<size_t>(c.size) * pitch, 0.0f);
    for (int i = 0; i < c.size; ++i)
      for (int j = 0; j < c.size; ++j)
        for (int t = 0; t < 2 * c.size; ++t)
          moment[i * pitch + j] += x[t * c.size + i] * x[t * c.size + j] / c.size;
  }
};

// Loss and errors of candidate `at` of a row (-1: the errors that are there).
double loss_of(const ScaleSearchArgs& a, const Inputs& in, int row, int at,
               std::vector<double>& e) {
  const int pitch = (a.size + 15) / 16 * 16;
  for (int i = 0; i < a.size; ++i) {
    const double w = in.weight[row * a.stride + i];
    if (at < 0) {
      e[i] = in.error[row * a.stride + i];
      continue;
    }
    const double scale = in.scales[row * a.num_scales + at / a.num_zeros];
    const double zero = in.zeros[row * a.num_zeros + at % a.num_zeros];
    const double q = fmin(fmax(nearbyint(w / scale + zero), a.low), a.high);
    e[i] = (q - zero) * scale - w;
  }
  double loss = 0;
  for (int i = 0; i < a.size; ++i) {
    double pull = 2.0 * in.others[row * a.size + i];
    for (int j = 0; j < a.size; ++j) pull += e[j] * in.moment[j * pitch + i];
    loss += pull * e[i];
  }
  return loss;
}

void check(const char* isa, void (*search)(const ScaleSearchArgs&), const Case& c,
           std::mt19937& rng) {
  const long stride = c.size + 3;
  Inputs in(c, stride, rng);
  std::vector<float> error = in.error;
  std::vector<int> chosen(c.rows, -7);
  const ScaleSearchArgs args = {in.weight.data(),
                                error.data(),
                                in.others.data(),
                                in.moment.data(),
                                in.scales.data(),
                                in.zeros.data(),
                                chosen.data(),
                                stride,
                                c.rows,
                                c.size,
                                c.scales,
                                c.zeros,
                                2,
                                0.0f,
                                15.0f};
  search(args);
  std::vector<double> e(c.size), best(c.size);
  for (int row = 0; row < c.rows; ++row) {
    double least = loss_of(args, in, row, -1, best);
    for (int at = 0; at < c.scales * c.zeros; ++at)
      least = fmin(least, loss_of(args, in, row, at, e));
    if (chosen[row] < -1 || chosen[row] >= c.scales * c.zeros)
      return fail(isa, c, "there is no such candidate");
    if (loss_of(args, in, row, chosen[row], e) > least + 1e-4 * (1 + fabs(least)))
      return fail(isa, c, "not the best");
    for (int i = 0; i < c.size; ++i)
      if (fabs(error[row * stride + i] - e[i]) > 1e-5)
        return fail(isa, c, "errors belong to another candidate");
    for (int i = c.size; i < stride && row + 1 < c.rows; ++i)
      if (error[row * stride + i] != in.error[row * stride + i])
        return fail(isa, c, "wrote outside the group");
  }
}

}  // namespace

int main() {
  const Case cases[] = {{1, 1, 1, 1},     {5, 8, 16, 1},   {7, 23, 16, 3},
                        {33, 32, 16, 1},  {3, 64, 5, 2},   {9, 100, 19, 3},
                        {17, 128, 16, 3}, {2, 127, 59, 1}, {4, 16, 1, 59}};
  std::mt19937 rng(5);
  int ran = 0;
  for (const Case& c : cases)
    for (int repeat = 0; repeat < 4; ++repeat, ++ran) {
      check("portable", search_scales_portable, c, rng);
#if defined(__x86_64__)
      if (best_isa() >= Isa::kAvx2) check("avx2", search_scales_avx2, c, rng);
      if (best_isa() >= Isa::kAvx512) check("avx512", search_scales_avx512, c, rng);
#endif
    }
  printf("scale search: %d cases, %d failures\n", ran, failures);
  return failures != 0;
}
