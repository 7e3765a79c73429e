#include "speculation/suffix_automaton.h"

#include <algorithm>

namespace ridgeline {
namespace {

// States whose last end a token updates: the shortest substrings of very many keep an older one.
constexpr int kMaxLinks = 32;

}  // namespace

int SuffixAutomaton::next(int state, int64_t token) const {
  if (!state) {
    const auto found = first_.find(token);
    return found == first_.end() ? -1 : found->second;
  }
  const Transitions& follows = states_[state].next;
  const auto at =
      std::lower_bound(follows.begin(), follows.end(), std::pair<int64_t, int>(token, -1));
  return at != follows.end() && at->first == token ? at->second : -1;
}

void SuffixAutomaton::set_next(int state, int64_t token, int to) {
  if (!state) {
    first_[token] = to;
    return;
  }
  Transitions& follows = states_[state].next;
  const auto at =
      std::lower_bound(follows.begin(), follows.end(), std::pair<int64_t, int>(token, -1));
  if (at != follows.end() && at->first == token)
    at->second = to;
  else
    follows.insert(at, {token, to});
}

void SuffixAutomaton::feed(int64_t token) {
  const int end = static_cast<int>(text_.size()), made = num_states();
  text_.push_back(token);
  states_.push_back({0, states_[last_].length + 1, end, {}});
  int at = last_;
  for (; at >= 0 && next(at, token) < 0; at = states_[at].link) set_next(at, token, made);
  states_[made].link = at < 0 ? 0 : split(at, token);
  last_ = made;
  int state = states_[made].link;
  for (int i = 0; i < kMaxLinks && state > 0; ++i, state = states_[state].link)
    states_[state].end = end;
}

// The state for the substrings of `at` followed by `token`, and nothing longer.
int SuffixAutomaton::split(int at, int64_t token) {
  const int whole = next(at, token), length = states_[at].length + 1;
  if (states_[whole].length == length) return whole;
  const int part = num_states();
  State made = states_[whole];
  made.length = length;
  states_.push_back(std::move(made));
  for (; at >= 0 && next(at, token) == whole; at = states_[at].link) set_next(at, token, part);
  states_[whole].link = part;
  return part;
}

void SuffixAutomaton::repair(SuffixMatch& match) const {
  for (int link = states_[match.state].link; link > 0 && match.length <= states_[link].length;
       link = states_[link].link)
    match.state = link;
}

void SuffixAutomaton::follow(SuffixMatch& match, int64_t token) const {
  int state = match.state;
  while (state && next(state, token) < 0) {
    state = states_[state].link;
    match.length = states_[state].length;
  }
  match.state = std::max(0, next(state, token));
  match.length = match.state ? std::min(kMaxMatch, match.length + 1) : 0;
  repair(match);
}

int SuffixAutomaton::last_end(SuffixMatch& match) const {
  repair(match);
  return states_[match.state].end;
}

}  // namespace ridgeline
