// Prompt lookup, suffix automaton and draft depths under sanitizers, against plain loops over the
// same texts: random ones of few words, which repeat themselves, growing piece by piece. What the
// numbers mean is tested from Python (tests/engine/speculate).
#include <stdio.h>

#include <algorithm>
#include <random>
#include <vector>

#include "speculation/drafts.h"
#include "speculation/suffix_automaton.h"

using namespace ridgeline;

namespace {

std::mt19937 rng(1);
int failures = 0, cases = 0;

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
double part() { return std::uniform_real_distribution<double>(0, 1)(rng); }

void expect(bool ok, const char* what) {
  ++cases;
  if (!ok && ++failures < 10) printf("FAIL: %s\n", what);
}

std::vector<Token> words(int num, int kinds) {
  std::vector<Token> text(num);
  for (Token& word : text) word = pick(1, kinds);
  return text;
}

// How many tokens up to `end` equal those that end the text.
int matching_tokens(const std::vector<Token>& text, int end) {
  int num = 0;
  for (; num <= end && text[end - num] == text[text.size() - 1 - num]; ++num) {
  }
  return num;
}

void check_index() {
  const int shortest = pick(1, 3), longest = shortest + pick(0, 3), kinds = pick(2, 5);
  TextIndex index(shortest, longest);
  for (int turn = 0; turn < 12; ++turn) {
    for (Token word : words(pick(0, 9), kinds)) index.tokens().push_back(word);
    index.update();
    const std::vector<Token>& text = index.tokens();
    int place = -1;  // the longest gram first, then the latest
    for (int n = longest; n >= shortest && place < 0; --n)
      for (int end = static_cast<int>(text.size()) - 2; end >= n - 1 && place < 0; --end)
        if (matching_tokens(text, end) >= n) place = end;
    const int most = pick(0, 20);
    const TokenGuess guess = index.look(1, most);
    std::vector<Token> expected = text;
    for (int i = 0; place >= 0 && i < most; ++i) expected.push_back(expected[place + 1 + i]);
    expected.erase(expected.begin(), expected.begin() + static_cast<long>(text.size()));
    expect(guess.tokens == expected && guess.kinds.size() == expected.size(), "prompt lookup");
  }
}

void check_automaton() {
  SuffixAutomaton automaton;
  SuffixMatch match;
  std::vector<Token> read;
  const int kinds = pick(2, 4);
  for (int turn = 0; turn < 40; ++turn) {
    for (Token word : words(pick(0, 5), kinds)) automaton.feed(word);
    const Token word = pick(1, kinds);
    read.push_back(word);
    automaton.repair(match);
    automaton.follow(match, word);
    const std::vector<Token>& text = automaton.text();
    if (!match.length) continue;
    const int end = automaton.last_end(match) + 1, length = match.length;
    const bool inside = end <= static_cast<int>(text.size()) && length <= end &&
                        length <= static_cast<int>(read.size());
    expect(inside && std::equal(read.end() - length, read.end(), text.begin() + (end - length)),
           "suffix automaton");
    expect(automaton.num_states() <= 2 * static_cast<int>(text.size()) + 1, "states");
  }
  SuffixMatch fresh;
  for (Token word : read) automaton.follow(fresh, word);
  const std::vector<Token>& text = automaton.text();
  int longest = 0;  // longest suffix of the text that occurs earlier
  for (auto end = text.begin(); end != text.end(); ++end) {
    int num = 0;
    while (num <= end - text.begin() && num < static_cast<int>(read.size()) &&
           *(end - num) == *(read.end() - 1 - num))
      ++num;
    longest = std::max(longest, num);
  }
  expect(fresh.length == longest, "longest tail");
}

void check_depths() {
  std::vector<std::vector<double>> survivals(pick(0, 9));
  std::vector<bool> computed;
  size_t num = 0;
  for (auto& own : survivals) {
    own.resize(pick(0, 24));
    double alive = 1;
    for (double& chance : own) chance = alive *= part();
    num += own.size();
    computed.push_back(pick(0, 2) == 0);
  }
  const int runs = static_cast<int>(survivals.size()), free = pick(0, 60);
  StepCurve curve(
      {{1, {{1, 1e-3}, {4, 2e-3}}}, {4, {{4, 2e-3}}}, {8, {{8, 3e-3}, {16, 3e-3}, {64, 9e-3}}}},
      {1, 2, 5});
  for (int i = pick(0, 9); i > 0; --i) {
    const int batch = pick(1, 12);
    curve.learn(batch, batch * pick(1, 7), 1e-3 * part());
  }
  const std::vector<double> line =
      curve.line(runs ? runs : 1, runs + 1 + !runs, static_cast<int>(num));
  expect(std::is_sorted(line.begin(), line.end()), "rising");
  const std::vector<double> drafting(pick(0, 1) * 24, 1e-4);
  const Depths best = choose_depths({survivals, computed, line, drafting, free, runs, 2e-3, 0.02});
  int sum = 0;
  for (size_t i = 0; i < survivals.size(); ++i) {
    expect(best.depths[i] <= static_cast<int>(survivals[i].size()),
           "no deeper than there are chances");
    sum += best.depths[i];
  }
  expect(sum <= free && best.tokens >= runs && best.tokens <= runs + sum + 1e-9,
         "no more than there is room for");
}

void check_record() {
  GuessRecord record(std::vector<double>(64, 0.5), {2, 3, 0.99, 0.85, 0.02});
  for (int turn = 0; turn < 60; ++turn) {
    const int seq = pick(0, 3), num_known = pick(0, 40);
    int start = 0;
    TokenGuess guess;
    if (record.pending(seq, num_known, &start, &guess))
      record.judge(seq, guess, words(pick(0, 9), 3));
    guess.tokens = words(pick(0, 6), 3);
    guess.kinds.assign(guess.tokens.size(), pick(0, 130));
    const std::vector<double> alive = record.survivals(seq, guess.kinds);
    expect(std::is_sorted(alive.rbegin(), alive.rend()) && alive.size() <= guess.kinds.size(),
           "chances fall");
    record.keep(seq, num_known, guess);
    if (pick(0, 9) == 0) record.forget(seq);
    expect(record.num_pending() <= 4, "one guess a sequence");
  }
}

}  // namespace

int main() {
  for (int round = 0; round < 400; ++round)
    check_index(), check_automaton(), check_depths(), check_record();
  printf("drafts: %d checks, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
