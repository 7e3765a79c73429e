// What to draft, without the interpreter: what a text's own past says comes next, how good such guesses turn out to be,
// and how many of them ride in a step. What is meant, and why, stands in ridgeline/engine/speculate: ngram.py, shadows.py,
// choose.py and cost.py. A step of eight sequences asks all of it once; it must not take longer than what it saves.
//
// Not for several threads at a time: the interpreter's lock is held meanwhile.
#pragma once
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ridgeline {

using Token = int64_t;

struct LookedUp {
  std::vector<Token> tokens;
  std::vector<int> kinds;  // as base.py's kind_of
};

// Where each n-gram of one sequence ended last; grams that end at the last token are not in.
class TextIndex {
 public:
  TextIndex(int shortest, int longest) : shortest_(shortest), ends_(longest - shortest + 1) {}
  std::vector<Token>& tokens() { return tokens_; }
  void read();              // takes in the grams of the tokens that are new
  LookedUp look(int num_prompt, int most) const;

 private:
  int longest() const { return shortest_ + static_cast<int>(ends_.size()) - 1; }
  uint64_t key(int n, int end) const;
  bool same(int n, int end, int other) const;
  int before(int n, int end) const;  // where the gram of n tokens up to `end` ended last; -1: nowhere
  int agreeing(int end) const;
  uint8_t told_of(int before, int place) const;

  int shortest_;
  std::vector<std::unordered_map<uint64_t, int>> ends_;  // by length, from the shortest on
  std::vector<Token> tokens_;
  std::vector<uint8_t> told_ = {1};  // what was known of each token before it came
};

// How often tokens of a kind were right where those before them in the guess were: of all sequences, and of each.
class GuessRecord {
 public:
  struct Weights {
    double prior, like_others, fade_all, fade_own, least;
  };
  GuessRecord(std::vector<double> priors, Weights weights) : priors_(std::move(priors)), weights_(weights) {}
  double chance(int kind) const;
  std::pair<double, double> counts(int kind) const;
  std::vector<double> survivals(int64_t seq, const std::vector<int>& kinds) const;
  void keep(int64_t seq, int num_known, LookedUp guess);
  // What was said of the sequence last, if anything was, and of which place on: no longer pending.
  bool pending(int64_t seq, int num_known, int* start, LookedUp* guess);
  void judge(int64_t seq, const LookedUp& guess, const std::vector<Token>& came);
  void forget(int64_t seq);
  int num_pending() const { return static_cast<int>(pending_.size()); }

 private:
  struct Count {
    double right = 0, all = 0;
    void note(bool was_right, double fade) { right = right * fade + was_right, all = all * fade + 1; }
  };
  struct Said {
    int num_known;
    LookedUp guess;
  };
  std::vector<double> priors_;
  Weights weights_;
  std::unordered_map<int, Count> all_;
  std::unordered_map<int64_t, std::unordered_map<int, Count>> own_;
  std::unordered_map<int64_t, Said> pending_;
};

struct Depths {
  std::vector<int> depths;
  double tokens, seconds;
};
struct Choice {
  const std::vector<std::vector<double>>& survivals;
  const std::vector<bool>& computed;
  const std::vector<double>& line;        // seconds of a step with 1, 2, … more rows
  const std::vector<double>& drafting_s;  // of drafts of 1, 2, … tokens that are computed; none: nothing is
  int num_free, num_runs;
  double plain_s, least;
};
Depths choose_depths(const Choice& choice);

// T(runs, rows) in seconds, corrected as steps are measured: speculate/cost.py says by what.
class StepCurve {
 public:
  using Points = std::vector<std::pair<int, double>>;  // rows, seconds; rising in both

  StepCurve(std::map<int, Points> grid, std::vector<int> knots);
  double seconds(int runs, int rows);
  // For `count` numbers of rows from `first` on, more than `runs`; none larger than one with more rows behind it.
  std::vector<double> line(int runs, int first, int count);
  void learn(int runs, int rows, double seconds);
  bool has_seen(int runs) const { return plain_.count(runs) > 0; }

 private:
  struct Factor {  // what a prediction is multiplied by
    double by = 1, num = 1;
    double move(double ratio, double least, double most = 1, double share = 1);
  };
  const std::vector<double>& at_start(int runs, int rows);
  double drafted_at(int runs, int rows, const std::vector<double>& starts) const;

  std::map<int, Points> grid_;
  std::vector<int> knots_;  // rows per run
  std::unordered_map<int, std::vector<double>> starts_;  // for 0, 1, 2, … rows, as far as they were asked for
  Factor machine_, drafted_;
  std::unordered_map<int, Factor> plain_;                // by batch
  std::unordered_map<int, std::vector<Factor>> depths_;  // by batch, at the knots
};

}  // namespace ridgeline
