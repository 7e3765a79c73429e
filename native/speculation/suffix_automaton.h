// A suffix automaton: every substring of a text, in at most two states per token.
//
// Each state stands for the substrings that end at the same places. `feed` appends a token in
// amortised constant time. `follow` moves a match, the longest tail of *another* text that occurs
// here, on by one token, also in amortised constant time. `last_end` is where the match ended last,
// so that what came after it can be copied.
//
// Source: Blumer et al. 1985; as a drafter: SAM-Decoding (Hu et al. 2024, arXiv 2411.10666).
//
// INVARIANT: a match is the longest tail of its text that occurs here, at most kMaxMatch tokens,
// also after the automaton has grown: a state that was split is repaired when it is next used
// (tests/engine/speculate/test_suffix.py).
#pragma once
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ridgeline {

// The match of another text: its last `length` tokens, at `state`.
struct SuffixMatch {
  int state = 0, length = 0;
};

class SuffixAutomaton {
 public:
  static constexpr int kMaxMatch = 64;  // tokens; longer matches count as this long

  SuffixAutomaton() : states_(1) { states_[0] = {-1, 0, -1, {}}; }
  void feed(int64_t token);
  void follow(SuffixMatch& match, int64_t token) const;
  // Where in the text the match, which must not be empty, ended last.
  int last_end(SuffixMatch& match) const;
  // Moves the match to the state of substrings of its length: the text may have grown since, and
  // the state may have been split.
  void repair(SuffixMatch& match) const;
  const std::vector<int64_t>& text() const { return text_; }
  int num_states() const { return static_cast<int>(states_.size()); }

 private:
  // Next states by token; those of the first state, which every token leaves, are in first_.
  using Transitions = std::vector<std::pair<int64_t, int>>;
  struct State {
    int link, length, end;
    Transitions next;
  };
  int next(int state, int64_t token) const;  // -1: there is none
  void set_next(int state, int64_t token, int to);
  int split(int at, int64_t token);

  std::vector<State> states_;
  std::unordered_map<int64_t, int> first_;
  std::vector<int64_t> text_;
  int last_ = 0;
};

}  // namespace ridgeline
