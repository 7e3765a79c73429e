// What to draft, without the interpreter: what a text's own past says comes next, how good such
// guesses turn out to be, and how many of them go into a step. ridgeline/engine/speculate explains
// the methods: drafters/ngram.py, depth_control/lookup_accuracy.py, depth_control/plan.py,
// depth_control/step_cost.py. A step of eight sequences asks all of it once, and it must not take
// longer than it saves.
//
// Not thread-safe: the interpreter's lock is held throughout.
#pragma once
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ridgeline {

using Token = int64_t;

struct TokenGuess {
  std::vector<Token> tokens;
  std::vector<int> kinds;  // as base.py's kind_of
};

// Where each n-gram of one sequence ended last, except those that end at its last token.
class TextIndex {
 public:
  TextIndex(int shortest, int longest) : shortest_(shortest), ends_(longest - shortest + 1) {}
  std::vector<Token>& tokens() { return tokens_; }
  void update();  // adds the n-grams of new tokens
  // Guesses `max_tokens` tokens; empty where no n-gram that ends the text was in it before.
  TokenGuess look(int num_prompt, int max_tokens) const;

 private:
  int longest() const { return shortest_ + static_cast<int>(ends_.size()) - 1; }
  uint64_t key(int n, int end) const;
  bool same(int n, int end, int other) const;
  int previous_end(int n, int end) const;  // of the n-gram that ends at `end`; -1: there is none
  int matching_tokens(int end) const;
  uint8_t prediction_of(int previous, int place) const;

  int shortest_;
  std::vector<std::unordered_map<uint64_t, int>> ends_;  // by length, from the shortest on
  std::vector<Token> tokens_;
  // Of each token, how well its earlier context predicted it (see drafts.cpp).
  std::vector<uint8_t> predictions_ = {1};
};

// How often guessed tokens of a kind were right, given that those before them in the guess were:
// over all sequences, and per sequence.
class GuessRecord {
 public:
  struct Weights {
    double prior, like_others, fade_all, fade_own, least;
  };
  GuessRecord(std::vector<double> priors, Weights weights)
      : priors_(std::move(priors)), weights_(weights) {}
  double chance(int kind) const;
  std::pair<double, double> counts(int kind) const;
  std::vector<double> survivals(int64_t seq, const std::vector<int>& kinds) const;
  void keep(int64_t seq, int num_known, TokenGuess guess);
  // Takes the sequence's last guess, if there is one, and the position it starts at.
  bool pending(int64_t seq, int num_known, int* start, TokenGuess* guess);
  void judge(int64_t seq, const TokenGuess& guess, const std::vector<Token>& came);
  void forget(int64_t seq);
  int num_pending() const { return static_cast<int>(pending_.size()); }

 private:
  struct Count {
    double right = 0, all = 0;
    void note(bool was_right, double fade) {
      right = right * fade + was_right, all = all * fade + 1;
    }
  };
  struct PendingGuess {
    int num_known;
    TokenGuess guess;
  };
  std::vector<double> priors_;
  Weights weights_;
  std::unordered_map<int, Count> all_;
  std::unordered_map<int64_t, std::unordered_map<int, Count>> own_;
  std::unordered_map<int64_t, PendingGuess> pending_;
};

struct Depths {
  std::vector<int> depths;
  double tokens, seconds;
};
struct Choice {
  const std::vector<std::vector<double>>& survivals;
  const std::vector<bool>& computed;
  const std::vector<double>& line;  // seconds of a step with 1, 2, … more rows
  const std::vector<double>&
      drafting_s;  // seconds of drafting 1, 2, … tokens with a model; empty: no draft is computed
  int num_free, num_runs;
  double plain_s, least;
};
Depths choose_depths(const Choice& choice);

// The time T(runs, rows) of a step in seconds, corrected as steps are measured
// (depth_control/step_cost.py says how).
class StepCurve {
 public:
  using Points = std::vector<std::pair<int, double>>;  // rows, seconds; rising in both

  StepCurve(std::map<int, Points> grid, std::vector<int> knots);
  double seconds(int runs, int rows);
  // The times for `count` numbers of rows from `first` on, which must be more than `runs`; made to
  // rise with the rows.
  std::vector<double> line(int runs, int first, int count);
  void learn(int runs, int rows, double seconds);
  bool has_seen(int runs) const { return plain_.count(runs) > 0; }

 private:
  struct Factor {  // multiplies a prediction
    double by = 1, num = 1;
    double move(double ratio, double least, double most = 1, double share = 1);
  };
  const std::vector<double>& initial_times(int runs, int rows);
  double time_with_drafts(int runs, int rows, const std::vector<double>& initial) const;

  std::map<int, Points> grid_;
  std::vector<int> knots_;  // rows per run
  std::unordered_map<int, std::vector<double>>
      initial_;  // for 0, 1, 2, … rows, as far as needed so far
  Factor machine_, drafted_;
  std::unordered_map<int, Factor> plain_;                // by batch
  std::unordered_map<int, std::vector<Factor>> depths_;  // by batch, at the knots
};

}  // namespace ridgeline
