#include "speculation/drafts.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace ridgeline {
namespace {

constexpr int kMaxMatching = 32, kMaxLevel = 6;  // as in drafters/ngram.py and drafters/base.py
// Whether a token was what followed the same n-gram before: not, there was none, yes, yes and so
// was that one.
constexpr uint8_t kWrong = 0, kUnknown = 1, kRight = 2, kRightAgain = 3;

int level_of(int length) {
  int level = 0;
  for (; length; length >>= 1) ++level;
  return std::min(level, kMaxLevel);
}

// How a step's time corrects the curve: the least weight of a new measurement for its own batch,
// and for all; how far knots that it says nothing about move towards it; and the ratio to the
// prediction beyond which it is ignored.
constexpr double kOwnWeight = 0.15, kCommonWeight = 0.03, kOtherKnots = 0.02, kOutlier = 10;
constexpr int kMoreRows = 64;  // interpolated beyond those that are needed

// Times for 0 to `most` rows: piecewise linear; below the first point constant, beyond the last
// extrapolated.
std::vector<double> interpolate(const StepCurve::Points& points, int most) {
  std::vector<double> times(most + 1);
  size_t piece = 1;
  for (int rows = 0; rows <= most; ++rows) {
    if (points.size() == 1) {
      times[rows] = points[0].second * std::max(1.0, static_cast<double>(rows) / points[0].first);
      continue;
    }
    while (piece + 1 < points.size() && rows >= points[piece].first) ++piece;
    const auto [x0, y0] = points[piece - 1];
    const auto [x1, y1] = points[piece];
    times[rows] =
        rows < points[0].first ? points[0].second : y0 + (y1 - y0) * (rows - x0) / (x1 - x0);
  }
  return times;
}

// A knot without measurements takes the factor of the nearest one that has some.
template <class Factor>
void fill_from_nearest(std::vector<Factor>& factors) {
  const int num = static_cast<int>(factors.size());
  for (int i = 0; i < num; ++i) {
    if (factors[i].num != 1) continue;
    int nearest = -1;
    for (int other = 0; other < num; ++other)
      if (factors[other].num > 1 && (nearest < 0 || std::abs(other - i) < std::abs(nearest - i)))
        nearest = other;
    if (nearest >= 0) factors[i].by = factors[nearest].by;
  }
}

}  // namespace

uint64_t TextIndex::key(int n, int end) const {
  uint64_t hash = 0;
  for (int i = end - n + 1; i <= end; ++i) {
    hash = (hash ^ static_cast<uint64_t>(tokens_[i])) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool TextIndex::same(int n, int end, int other) const {
  return std::equal(tokens_.begin() + (end - n + 1), tokens_.begin() + end + 1,
                    tokens_.begin() + (other - n + 1));
}

int TextIndex::previous_end(int n, int end) const {
  const auto& ends = ends_[n - shortest_];
  const auto entry = ends.find(key(n, end));
  return entry != ends.end() && same(n, end, entry->second) ? entry->second : -1;
}

uint8_t TextIndex::prediction_of(int previous, int place) const {
  if (tokens_[previous] != tokens_[place]) return kWrong;
  return predictions_[previous] >= kRight ? kRightAgain : kRight;
}

void TextIndex::update() {
  const int last_token = static_cast<int>(tokens_.size()) - 1;
  for (int end = static_cast<int>(predictions_.size()) - 1; end < last_token; ++end) {
    int last = -1;
    for (int n = longest(); n >= shortest_; --n) {
      if (end < n - 1) continue;
      int& at = ends_[n - shortest_].try_emplace(key(n, end), -1).first->second;
      if (last < 0 && at >= 0 && same(n, end, at)) last = at;
      at = end;
    }
    predictions_.push_back(last < 0 ? kUnknown : prediction_of(last + 1, end + 1));
  }
}

int TextIndex::matching_tokens(int end) const {
  const int last = static_cast<int>(tokens_.size()) - 1, most = std::min(kMaxMatching, end + 1);
  int num = 0;
  while (num < most && tokens_[end - num] == tokens_[last - num]) ++num;
  return num;
}

TokenGuess TextIndex::look(int num_prompt, int max_tokens) const {
  const int size = static_cast<int>(tokens_.size());
  int end = -1;
  for (int n = longest(); n >= shortest_ && end < 0; --n)
    if (size > n) end = previous_end(n, size - 1);
  TokenGuess guess;
  if (end < 0 || max_tokens <= 0) return guess;
  const int start = end + 1, period = size - start, length = matching_tokens(end);
  guess.tokens.reserve(max_tokens);
  guess.kinds.reserve(max_tokens);
  for (int i = 0; i < max_tokens; ++i) {
    const int place = start + i % period;  // past the end, the copy itself is read
    guess.tokens.push_back(tokens_[place]);
    guess.kinds.push_back((level_of(std::min(kMaxMatching, length + i)) * 4 + predictions_[place]) *
                              2 +
                          (place >= num_prompt));
  }
  return guess;
}

double GuessRecord::chance(int kind) const {
  const auto entry = all_.find(kind);
  const Count count = entry == all_.end() ? Count() : entry->second;
  return (count.right + weights_.prior * priors_[kind % priors_.size()]) /
         (count.all + weights_.prior);
}

std::pair<double, double> GuessRecord::counts(int kind) const {
  const auto entry = all_.find(kind);
  return entry == all_.end() ? std::pair<double, double>()
                             : std::pair(entry->second.right, entry->second.all);
}

std::vector<double> GuessRecord::survivals(int64_t seq, const std::vector<int>& kinds) const {
  const auto owner = own_.find(seq);
  std::vector<double> survivals;
  double alive = 1.0;
  for (int kind : kinds) {
    double chance = this->chance(kind);
    if (owner != own_.end()) {
      const auto own = owner->second.find(kind);
      if (own != owner->second.end())
        chance = (own->second.right + weights_.like_others * chance) /
                 (own->second.all + weights_.like_others);
    }
    alive *= chance;
    if (alive < weights_.least) break;
    survivals.push_back(alive);
  }
  return survivals;
}

void GuessRecord::keep(int64_t seq, int num_known, TokenGuess guess) {
  if (guess.tokens.empty())
    pending_.erase(seq);
  else
    pending_[seq] = {num_known, std::move(guess)};
}

bool GuessRecord::pending(int64_t seq, int num_known, int* start, TokenGuess* guess) {
  const auto entry = pending_.find(seq);
  if (entry == pending_.end()) return false;
  *start = entry->second.num_known;
  *guess = std::move(entry->second.guess);
  pending_.erase(entry);
  return num_known > *start;
}

void GuessRecord::judge(int64_t seq, const TokenGuess& guess, const std::vector<Token>& came) {
  auto& own = own_[seq];
  for (size_t i = 0; i < std::min({guess.tokens.size(), guess.kinds.size(), came.size()}); ++i) {
    const bool is_right = guess.tokens[i] == came[i];
    all_[guess.kinds[i]].note(is_right, weights_.fade_all);
    own[guess.kinds[i]].note(is_right, weights_.fade_own);
    if (!is_right) return;
  }
}

void GuessRecord::forget(int64_t seq) {
  pending_.erase(seq);
  own_.erase(seq);
}

Depths choose_depths(const Choice& c) {
  struct Entry {
    double chance;
    int sequence, place;
  };
  std::vector<Entry> order;
  for (size_t i = 0; i < c.survivals.size(); ++i)
    for (size_t place = 0; place < c.survivals[i].size(); ++place)
      if (c.survivals[i][place] >= c.least)
        order.push_back({c.survivals[i][place], static_cast<int>(i), static_cast<int>(place)});
  std::stable_sort(order.begin(), order.end(), [](const Entry& a, const Entry& b) {
    return a.chance != b.chance ? a.chance > b.chance : a.place < b.place;
  });
  if (order.size() > static_cast<size_t>(std::max(0, c.num_free)))
    order.resize(std::max(0, c.num_free));
  if (order.size() > c.line.size())
    throw std::invalid_argument(
        "the list of step times is shorter than the number of tokens to draft");
  Depths best = {std::vector<int>(c.survivals.size()), static_cast<double>(c.num_runs), c.plain_s};
  double tokens = best.tokens, drafting_s = 0;
  size_t num_best = 0;
  int deepest = 0;
  for (size_t num = 0; num < order.size(); ++num) {
    const Entry& entry = order[num];
    tokens += entry.chance;
    if (c.computed[entry.sequence] && entry.place >= deepest && !c.drafting_s.empty()) {
      deepest = entry.place + 1;
      drafting_s = c.drafting_s[std::min<size_t>(entry.place, c.drafting_s.size() - 1)];
    }
    const double seconds = c.line[num] + drafting_s;
    if (tokens * best.seconds > best.tokens * seconds)
      best.tokens = tokens, best.seconds = seconds, num_best = num + 1;
  }
  for (size_t num = 0; num < num_best; ++num) {
    int& depth = best.depths[order[num].sequence];
    depth = std::max(depth, order[num].place + 1);
  }
  return best;
}

StepCurve::StepCurve(std::map<int, Points> grid, std::vector<int> knots)
    : grid_(std::move(grid)), knots_(std::move(knots)) {
  bool ok = !grid_.empty() && knots_.size() > 1 && knots_[0] == 1;
  for (const auto& each : grid_)
    ok = ok && each.first > 0 && !each.second.empty() && each.second[0].first > 0;
  if (!ok)
    throw std::invalid_argument(
        "a curve needs a batch, rows of it, and knots from one row per run on");
}

double StepCurve::Factor::move(double ratio, double least, double most, double share) {
  const double way = 1 / (num + (ratio > 1));
  num += share;
  const double step = 1 + share * std::min(most, std::max(least, way)) * (ratio - 1);
  by *= step;
  return step;
}

const std::vector<double>& StepCurve::initial_times(int runs, int rows) {
  std::vector<double>& initial = initial_[runs];
  if (static_cast<size_t>(rows) < initial.size()) return initial;
  const int most = rows + kMoreRows;
  auto high = grid_.lower_bound(runs), low = high;
  if (high == grid_.end())
    low = --high;
  else if (high->first > runs && high != grid_.begin())
    --low;
  initial = interpolate(low->second, most);
  if (low->first != high->first) {
    const double share = static_cast<double>(runs - low->first) / (high->first - low->first);
    const std::vector<double> above = interpolate(high->second, most);
    for (int i = 0; i <= most; ++i) initial[i] += (above[i] - initial[i]) * share;
  }
  return initial;
}

// The time of a step with drafts, not yet made to rise with the rows.
double StepCurve::time_with_drafts(int runs, int rows, const std::vector<double>& initial) const {
  const double start = machine_.by * drafted_.by * initial[rows];
  const auto own = depths_.find(runs);
  if (own == depths_.end()) return start;
  const std::vector<Factor>& factors = own->second;
  for (size_t i = 1; i < knots_.size(); ++i) {
    const int end = knots_[i] * runs;
    if (rows >= end) continue;
    const double low = factors[i - 1].by, high = factors[i].by;
    return start * (high + (high - low) / (end - knots_[i - 1] * runs) * (rows - end));
  }
  return start * factors.back().by;
}

double StepCurve::seconds(int runs, int rows) {
  const std::vector<double>& initial = initial_times(runs, rows);
  if (rows > runs) return time_with_drafts(runs, rows, initial);
  const auto plain = plain_.find(runs);
  return initial[rows] * machine_.by * (plain == plain_.end() ? 1 : plain->second.by);
}

std::vector<double> StepCurve::line(int runs, int first, int count) {
  const std::vector<double>& initial = initial_times(runs, first + count);
  std::vector<double> times(count);
  for (int i = 0; i < count; ++i) times[i] = time_with_drafts(runs, first + i, initial);
  for (int i = count - 2; i >= 0; --i) times[i] = std::min(times[i], times[i + 1]);
  return times;
}

void StepCurve::learn(int runs, int rows, double seconds) {
  double ratio = seconds / this->seconds(runs, rows);
  if (ratio > kOutlier) return;
  ratio = std::min(2.0, ratio);
  if (rows <= runs) {
    ratio /= machine_.move(ratio, kCommonWeight, kCommonWeight);
    plain_[runs].move(ratio, kOwnWeight);
    return;
  }
  ratio /= drafted_.move(ratio, kCommonWeight, 0.25);
  std::vector<Factor>& factors = depths_.try_emplace(runs, knots_.size()).first->second;
  const double depth = static_cast<double>(rows) / runs;
  size_t at = 1;  // the knot behind the depth
  while (at < knots_.size() && knots_[at] <= depth) ++at;
  const bool is_beyond = at == knots_.size();
  const double share = is_beyond ? 0 : (depth - knots_[at - 1]) / (knots_[at] - knots_[at - 1]);
  factors[at - 1].move(ratio, kOwnWeight, 1, 1 - share);
  if (!is_beyond) factors[at].move(ratio, kOwnWeight, 1, share);
  const double shown = factors[at - 1].by * (1 - share) + (is_beyond ? 0 : factors[at].by * share);
  for (size_t i = 0; i < factors.size(); ++i)
    if (i != at - 1 && (is_beyond || i != at))
      factors[i].by += kOtherKnots * (shown - factors[i].by);
  fill_from_nearest(factors);
}

}  // namespace ridgeline
