#include "automaton.h"

#include <algorithm>

namespace ridgeline {
namespace {

constexpr int kMostLinks = 32;  // states whose latest place is brought up to date by a token: the shortest of very many stay behind

}  // namespace

int Automaton::next(int state, int64_t token) const {
  if (!state) {
    const auto found = first_.find(token);
    return found == first_.end() ? -1 : found->second;
  }
  const Follows& follows = states_[state].next;
  const auto at = std::lower_bound(follows.begin(), follows.end(), std::pair<int64_t, int>(token, -1));
  return at != follows.end() && at->first == token ? at->second : -1;
}

void Automaton::set_next(int state, int64_t token, int to) {
  if (!state) {
    first_[token] = to;
    return;
  }
  Follows& follows = states_[state].next;
  const auto at = std::lower_bound(follows.begin(), follows.end(), std::pair<int64_t, int>(token, -1));
  if (at != follows.end() && at->first == token) at->second = to;
  else follows.insert(at, {token, to});
}

void Automaton::feed(int64_t token) {
  const int end = static_cast<int>(text_.size()), made = num_states();
  text_.push_back(token);
  states_.push_back({0, states_[last_].length + 1, end, {}});
  int at = last_;
  for (; at >= 0 && next(at, token) < 0; at = states_[at].link) set_next(at, token, made);
  states_[made].link = at < 0 ? 0 : split(at, token);
  last_ = made;
  int state = states_[made].link;
  for (int i = 0; i < kMostLinks && state > 0; ++i, state = states_[state].link) states_[state].end = end;
}

// The state for what `at` holds, with `token` behind it, and nothing longer.
int Automaton::split(int at, int64_t token) {
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

void Automaton::repair(Reader& reader) const {
  for (int link = states_[reader.state].link; link > 0 && reader.length <= states_[link].length; link = states_[link].link)
    reader.state = link;
}

void Automaton::follow(Reader& reader, int64_t token) const {
  int state = reader.state;
  while (state && next(state, token) < 0) {
    state = states_[state].link;
    reader.length = states_[state].length;
  }
  reader.state = std::max(0, next(state, token));
  reader.length = reader.state ? std::min(kLongest, reader.length + 1) : 0;
  repair(reader);
}

int Automaton::place(Reader& reader) const {
  repair(reader);
  return states_[reader.state].end;
}

}  // namespace ridgeline
