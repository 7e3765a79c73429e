#include "sampling/draw.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace ridgeline {
namespace {

constexpr int kBuckets = 1024;
// Width of all buckets in units of temperature: down to e^-24 of the largest weight.
constexpr double kBucketRange = 24.0;

struct Row {
  const float* x;
  std::vector<float> weight;
  float largest;
  double temperature;
  int64_t width;

  // Rises as the logit falls; the last bucket holds all the rest, minus infinity too.
  int bucket(int64_t i) const {
    const double depth =
        (static_cast<double>(largest) - x[i]) / temperature * (kBuckets / kBucketRange);
    return depth < kBuckets - 1 ? static_cast<int>(depth) : kBuckets - 1;
  }
};

struct Buckets {
  std::vector<int> of_token;
  std::vector<int64_t> count;
  std::vector<double> mass;

  explicit Buckets(const Row& row)
      : of_token(static_cast<size_t>(row.width)), count(kBuckets), mass(kBuckets) {
    for (int64_t i = 0; i < row.width; ++i) {
      const int b = of_token[i] = row.bucket(i);
      count[b] += 1;
      mass[b] += row.weight[i];
    }
  }

  std::vector<int64_t> sorted(const Row& row, int b) const {
    std::vector<int64_t> ids;
    ids.reserve(static_cast<size_t>(count[b]));
    for (int64_t i = 0; i < row.width; ++i)
      if (of_token[i] == b) ids.push_back(i);
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int64_t a, int64_t c) { return row.x[a] > row.x[c]; });
    return ids;
  }
};

// The last token that is kept, and the mass of those up to it. id -1: all are kept.
struct Cut {
  int64_t id;
  double mass;
};

// Keeps at most `max_count` tokens, and none behind those whose mass reaches `max_mass`.
Cut find_cut(const Row& row, const Buckets& buckets, int64_t max_count, double max_mass) {
  int64_t count = 0, last = -1;
  double mass = 0;
  for (int b = 0; b < kBuckets; ++b) {
    if (!buckets.count[b]) continue;
    if (count + buckets.count[b] <= max_count && mass + buckets.mass[b] < max_mass) {
      count += buckets.count[b];
      mass += buckets.mass[b];
      continue;
    }
    for (int64_t id : buckets.sorted(row, b)) {
      if (count >= max_count || mass >= max_mass) {
        if (last >= 0) return {last, mass};
        break;  // the cut is between buckets: the one before this has the last token
      }
      last = id;
      count += 1;
      mass += row.weight[id];
    }
    if (count >= max_count || mass >= max_mass) {
      if (last >= 0) return {last, mass};
      for (int before = b - 1; before >= 0; --before)
        if (buckets.count[before]) return {buckets.sorted(row, before).back(), mass};
    }
    last = -1;
  }
  return {-1, mass};
}

// Sets the weights of the tokens behind the cut to zero.
void drop_behind(Row& row, const Cut& cut) {
  if (cut.id < 0) return;
  const float edge = row.x[cut.id];
  for (int64_t i = 0; i < row.width; ++i)
    if (row.x[i] < edge || (row.x[i] == edge && i > cut.id)) row.weight[i] = 0.0f;
}

// The first token whose cumulative weight exceeds the share `number` of the total.
int64_t pick_token(const Row& row, double number) {
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
  const int64_t top = ops.argmax(x, width);
  if (top < 0 || !std::isfinite(x[top])) return -1;
  Row row = {x, std::vector<float>(static_cast<size_t>(width)), x[top], args.temperature, width};
  ops.softmax_weights(x, row.largest, static_cast<float>(args.temperature), width,
                      row.weight.data());
  if (args.min_p > 0)
    for (float& w : row.weight) w = w < static_cast<float>(args.min_p) ? 0.0f : w;
  const bool has_top_k = args.top_k > 0 && args.top_k < width;
  if (has_top_k || args.top_p < 1) {
    const Buckets buckets(row);
    const int64_t max_count = has_top_k ? args.top_k : width;
    Cut cut = find_cut(row, buckets, max_count, INFINITY);
    if (args.top_p < 1) cut = find_cut(row, buckets, max_count, args.top_p * cut.mass);
    drop_behind(row, cut);
  }
  return pick_token(row, args.number);
}

}  // namespace ridgeline
