// A suffix automaton: every substring of a text, in at most two states per token.
//
// Each state stands for the substrings that end at the same places. `feed` appends a token in amortised constant time;
// `follow` takes a reader, who stands on the longest tail of *another* text that occurs here, one token further, also in
// amortised constant time. `place` is where what the reader matches ended last, so that what came after it can be copied.
//
// Source: Blumer et al. 1985; as a drafter: SAM-Decoding (Hu et al. 2024, arXiv 2411.10666).
//
// INVARIANT: a reader's match is the longest tail of its text that occurs here, also after the automaton has grown (a state
// that was split is repaired as it is passed), of kLongest tokens at most (tests/engine/speculate/test_suffix.py).
#pragma once
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ridgeline {

// Where another text stands: it has matched the last `length` of its tokens at `state`.
struct Reader {
  int state = 0, length = 0;
};

class Automaton {
 public:
  static constexpr int kLongest = 64;  // tokens of a match that are told apart

  Automaton() : states_(1) { states_[0] = {-1, 0, -1, {}}; }
  void feed(int64_t token);
  void follow(Reader& reader, int64_t token) const;
  // Where in the text the reader's match ended last; it must have one.
  int place(Reader& reader) const;
  // Back to the state that holds substrings of the reader's length: the text may have grown, and have split the state.
  void repair(Reader& reader) const;
  const std::vector<int64_t>& text() const { return text_; }
  int num_states() const { return static_cast<int>(states_.size()); }

 private:
  using Follows = std::vector<std::pair<int64_t, int>>;  // by token; of the first state, whom every token leaves, first_
  struct State {
    int link, length, end;
    Follows next;
  };
  int next(int state, int64_t token) const;  // -1: none
  void set_next(int state, int64_t token, int to);
  int split(int at, int64_t token);

  std::vector<State> states_;
  std::unordered_map<int64_t, int> first_;
  std::vector<int64_t> text_;
  int last_ = 0;
};

}  // namespace ridgeline
