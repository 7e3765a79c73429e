// See sample.h.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace ridgeline {
namespace {

constexpr int kBuckets = 1024;
constexpr double kReach = 24.0;  // of the buckets, in units of temperature: e^-24 of the largest weight

struct Row {
  const float* x;
  std::vector<float> weight;
  float largest;
  double temperature;
  int64_t width;

  // Not falling as the logit falls; the last bucket holds the rest, minus infinity too.
  int bucket(int64_t i) const {
    const double depth = (static_cast<double>(largest) - x[i]) / temperature * (kBuckets / kReach);
    return depth < kBuckets - 1 ? static_cast<int>(depth) : kBuckets - 1;
  }
};

struct Piles {
  std::vector<int> of;  // bucket of each token
  std::vector<int64_t> count;
  std::vector<double> mass;

  explicit Piles(const Row& row) : of(static_cast<size_t>(row.width)), count(kBuckets), mass(kBuckets) {
    for (int64_t i = 0; i < row.width; ++i) {
      const int b = of[i] = row.bucket(i);
      count[b] += 1;
      mass[b] += row.weight[i];
    }
  }

  std::vector<int64_t> sorted(const Row& row, int b) const {
    std::vector<int64_t> ids;
    ids.reserve(static_cast<size_t>(count[b]));
    for (int64_t i = 0; i < row.width; ++i)
      if (of[i] == b) ids.push_back(i);
    std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t c) { return row.x[a] > row.x[c]; });
    return ids;
  }
};

// The last token that stays, and what those up to it weigh. id -1: all stay.
struct Cut {
  int64_t id;
  double mass;
};

// Keep at most `most` tokens, and none once those before it weigh `enough`.
Cut cut_at(const Row& row, const Piles& piles, int64_t most, double enough) {
  int64_t count = 0, last = -1;
  double mass = 0;
  for (int b = 0; b < kBuckets; ++b) {
    if (!piles.count[b]) continue;
    if (count + piles.count[b] <= most && mass + piles.mass[b] < enough) {
      count += piles.count[b];
      mass += piles.mass[b];
      continue;
    }
    for (int64_t id : piles.sorted(row, b)) {
      if (count >= most || mass >= enough) {
        if (last >= 0) return {last, mass};
        break;  // the cut lies between buckets: the one before this has the last token
      }
      last = id;
      count += 1;
      mass += row.weight[id];
    }
    if (count >= most || mass >= enough) {
      if (last >= 0) return {last, mass};
      for (int before = b - 1; before >= 0; --before)
        if (piles.count[before]) return {piles.sorted(row, before).back(), mass};
    }
    last = -1;
  }
  return {-1, mass};
}

// Weights of the tokens behind the cut become zero.
void restrict_to(Row& row, const Cut& cut) {
  if (cut.id < 0) return;
  const float edge = row.x[cut.id];
  for (int64_t i = 0; i < row.width; ++i)
    if (row.x[i] < edge || (row.x[i] == edge && i > cut.id)) row.weight[i] = 0.0f;
}

int64_t walk(const Row& row, double number) {
  double total = 0, sum = 0;
  for (int64_t i = 0; i < row.width; ++i) total += row.weight[i];
  const double target = number * total;
  int64_t last = 0;
  for (int64_t i = 0; i < row.width; ++i) {
    if (row.weight[i] == 0.0f) continue;
    sum += row.weight[i];
    last = i;
    if (sum > target) return i;
  }
  return last;
}

}  // namespace

int64_t draw_token(const RowOps& ops, const float* x, int64_t width, const DrawArgs& args) {
  const int64_t top = ops.first_largest(x, width);
  if (top < 0 || !std::isfinite(x[top])) return -1;
  Row row = {x, std::vector<float>(static_cast<size_t>(width)), x[top], args.temperature, width};
  ops.weigh(x, row.largest, static_cast<float>(args.temperature), width, row.weight.data());
  if (args.min_p > 0)
    for (float& w : row.weight) w = w < static_cast<float>(args.min_p) ? 0.0f : w;
  const bool some = args.top_k > 0 && args.top_k < width;
  if (some || args.top_p < 1) {
    const Piles piles(row);
    const int64_t most = some ? args.top_k : width;
    Cut cut = cut_at(row, piles, most, INFINITY);
    if (args.top_p < 1) cut = cut_at(row, piles, most, args.top_p * cut.mass);
    restrict_to(row, cut);
  }
  return walk(row, args.number);
}

}  // namespace ridgeline
