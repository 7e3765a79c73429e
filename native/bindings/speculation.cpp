// Python bindings of speculation/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "simd/dispatch.h"
#include "speculation/drafts.h"
#include "speculation/suffix_automaton.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

// The tokens of a list or tuple, read in place; of anything else, of a list made from it.
class TokenSequence {
 public:
  explicit TokenSequence(nb::handle object)
      : fast_(nb::steal(PySequence_Fast(object.ptr(), "tokens must be a sequence"))) {
    if (!fast_.is_valid()) throw nb::python_error();
    size_ = static_cast<int>(PySequence_Fast_GET_SIZE(fast_.ptr()));
  }
  int size() const { return size_; }
  Token operator[](int i) const {
    const Token token = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast_.ptr(), i));
    if (token == -1 && PyErr_Occurred()) throw nb::python_error();
    return token;
  }
  std::vector<Token> from(int first, int end) const {
    std::vector<Token> tokens;
    for (int i = first; i < std::min(end, size_); ++i) tokens.push_back((*this)[i]);
    return tokens;
  }

 private:
  nb::object fast_;
  int size_ = 0;
};

template <class T>
nb::object tuple_of(const std::vector<T>& numbers) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i)
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  return tuple;
}

class PromptLookup {
 public:
  PromptLookup(int shortest, int longest) : shortest_(shortest), longest_(longest) {
    require(shortest > 0 && shortest <= longest, "n-grams need 1 <= shortest <= longest");
  }

  nb::object look(int64_t seq, nb::handle tokens, int num_prompt, int max_tokens) {
    const TokenSequence sequence(tokens);
    auto entry = texts_.try_emplace(seq, shortest_, longest_).first;
    const int known = static_cast<int>(entry->second.tokens().size());
    if (known > sequence.size() || (known && entry->second.tokens().back() != sequence[known - 1]))
      entry->second = TextIndex(shortest_, longest_);  // another text
    TextIndex& text = entry->second;
    for (int i = static_cast<int>(text.tokens().size()); i < sequence.size(); ++i)
      text.tokens().push_back(sequence[i]);
    text.update();
    const TokenGuess guess = text.look(num_prompt, max_tokens);
    if (guess.tokens.empty()) return nb::none();
    return nb::make_tuple(tuple_of(guess.tokens), tuple_of(guess.kinds));
  }

  void forget(int64_t seq) { texts_.erase(seq); }
  int num_texts() const { return static_cast<int>(texts_.size()); }

 private:
  int shortest_, longest_;
  std::unordered_map<int64_t, TextIndex> texts_;
};

GuessRecord make_record(std::vector<double> priors, double prior, double like_others,
                        double fade_all, double fade_own, double least) {
  require(!priors.empty(), "at least one prior is needed");
  return GuessRecord(std::move(priors), {prior, like_others, fade_all, fade_own, least});
}

void keep(GuessRecord& self, int64_t seq, int num_known, std::vector<Token> tokens,
          std::vector<int> kinds) {
  for (int kind : kinds) require(kind >= 0, "kinds must not be negative");
  self.keep(seq, num_known, {std::move(tokens), std::move(kinds)});
}

void compare(GuessRecord& self, int64_t seq, nb::handle tokens) {
  const TokenSequence sequence(tokens);
  int start = 0;
  TokenGuess guess;
  if (!self.pending(seq, sequence.size(), &start, &guess)) return;
  self.judge(seq, guess, sequence.from(start, start + static_cast<int>(guess.tokens.size())));
}

void feed(SuffixAutomaton& self, nb::handle tokens) {
  const TokenSequence sequence(tokens);
  for (int i = 0; i < sequence.size(); ++i) self.feed(sequence[i]);
}

// The match of one sequence's own tokens, of which num_read were read.
struct SequenceMatch {
  SuffixMatch match;
  int num_read;
};

// Reads on to the end of `sequence`; if that became shorter, from its last `warm` tokens on.
void read_on(const SuffixAutomaton& self, SequenceMatch& at, const TokenSequence& sequence,
             int warm) {
  if (at.num_read > sequence.size()) at = {SuffixMatch(), std::max(0, sequence.size() - warm)};
  self.repair(at.match);
  for (; at.num_read < sequence.size(); ++at.num_read) self.follow(at.match, sequence[at.num_read]);
}

// (length of the match, what followed it last: up to `max_tokens` tokens and twice its length, up
// to the first `stop`), or None where the match is not longer than `longer_than` or nothing
// followed.
nb::object look(const SuffixAutomaton& self, SequenceMatch& at, nb::handle tokens, int warm,
                int longer_than, int max_tokens, Token stop) {
  read_on(self, at, TokenSequence(tokens), warm);
  const int length = at.match.length;
  if (!length || length <= longer_than) return nb::none();
  const std::vector<Token>& text = self.text();
  const int first = self.last_end(at.match) + 1;
  const int end = std::min(static_cast<int>(text.size()), first + std::min(max_tokens, 2 * length));
  std::vector<Token> draft;
  for (int i = first; i < end && text[i] != stop; ++i) draft.push_back(text[i]);
  if (draft.empty()) return nb::none();
  return nb::make_tuple(length, tuple_of(draft));
}

nb::tuple choose(const std::vector<std::vector<double>>& survivals,
                 const std::vector<bool>& computed, int num_free, int num_runs, double plain_s,
                 const std::vector<double>& line, const std::vector<double>& drafting_s,
                 double least) {
  require(survivals.size() == computed.size(), "survivals and computed must have the same length");
  const Depths best =
      choose_depths({survivals, computed, line, drafting_s, num_free, num_runs, plain_s, least});
  return nb::make_tuple(best.depths, best.tokens, best.seconds);
}

constexpr int kMaxRows = 1 << 24;  // of a step: a curve has a number for each

void check_rows(int runs, int rows, int more = 0) {
  require(runs > 0 && rows >= 0 && more >= 0, "runs and rows must be positive (rows: or 0)");
  require(rows <= kMaxRows && more <= kMaxRows, "a step has at most 2**24 rows");
}

double curve_seconds(StepCurve& self, int runs, int rows) {
  check_rows(runs, rows);
  return self.seconds(runs, rows);
}

std::vector<double> curve_line(StepCurve& self, int runs, int first, int count) {
  check_rows(runs, first, count);
  require(first > runs, "drafts add rows to those of the runs: first must exceed runs");
  return self.line(runs, first, count);
}

void curve_learn(StepCurve& self, int runs, int rows, double seconds) {
  check_rows(runs, rows);
  self.learn(runs, rows, seconds);
}

}  // namespace

void bind_speculation(nb::module_& m) {
  nb::class_<PromptLookup>(m, "PromptLookup", "What a sequence's own text says comes next.")
      .def(nb::init<int, int>(), nb::arg("shortest"), nb::arg("longest"))
      .def("look", &PromptLookup::look, nb::arg("seq_id"), nb::arg("tokens"), nb::arg("num_prompt"),
           nb::arg("max_tokens"),
           nb::sig("def look(self, seq_id: int, tokens: collections.abc.Sequence[int], num_prompt: "
                   "int, max_tokens: int) "
                   "-> tuple[tuple[int, ...], tuple[int, ...]] | None"),
           "(tokens, kinds) of `max_tokens` tokens, or None where no n-gram that ends the text was "
           "in it before.")
      .def("forget", &PromptLookup::forget, nb::arg("seq_id"))
      .def_prop_ro("num_texts", &PromptLookup::num_texts);
  nb::class_<SequenceMatch>(m, "SuffixMatch", "How far a sequence's tokens match an automaton.")
      .def(
          "__init__",
          [](SequenceMatch* at, int num_read) { new (at) SequenceMatch{SuffixMatch(), num_read}; },
          nb::arg("num_read"))
      .def_prop_ro(
          "length", [](const SequenceMatch& at) { return at.match.length; },
          "Tokens of the sequence's tail that occur in the text.");
  nb::class_<SuffixAutomaton>(m, "SuffixAutomaton", "A suffix automaton of a text.")
      .def(nb::init<>())
      .def("feed", &feed, nb::arg("tokens"),
           nb::sig("def feed(self, tokens: collections.abc.Sequence[int]) -> None"),
           "Appends tokens to the text.")
      .def("look", &look, nb::arg("match"), nb::arg("tokens"), nb::arg("warm"),
           nb::arg("longer_than"), nb::arg("max_tokens"), nb::arg("stop"),
           nb::sig("def look(self, match: SuffixMatch, tokens: collections.abc.Sequence[int], "
                   "warm: int, longer_than: int, "
                   "max_tokens: int, stop: int) -> tuple[int, tuple[int, ...]] | None"),
           "(length, tokens): how long a tail of `tokens` occurs in the text and what followed it "
           "last; or None.")
      .def_prop_ro("num_states", &SuffixAutomaton::num_states)
      .def_prop_ro("num_tokens", [](const SuffixAutomaton& self) { return self.text().size(); });
  nb::class_<GuessRecord>(m, "GuessRecord", "How often guesses were right, by kind.")
      .def(nb::new_(&make_record), nb::arg("priors"), nb::arg("prior_weight"),
           nb::arg("like_others"), nb::arg("fade_all"), nb::arg("fade_own"),
           nb::arg("least_chance"))
      .def("chance", &GuessRecord::chance, nb::arg("kind"))
      .def("counts", &GuessRecord::counts, nb::arg("kind"))
      .def("survivals", &GuessRecord::survivals, nb::arg("seq_id"), nb::arg("kinds"))
      .def("keep", &keep, nb::arg("seq_id"), nb::arg("num_known"), nb::arg("tokens"),
           nb::arg("kinds"))
      .def("compare", &compare, nb::arg("seq_id"), nb::arg("tokens"),
           nb::sig("def compare(self, seq_id: int, tokens: collections.abc.Sequence[int]) -> None"))
      .def("forget", &GuessRecord::forget, nb::arg("seq_id"))
      .def_prop_ro("num_pending", &GuessRecord::num_pending);
  m.def(
      "choose_depths", &choose, nb::arg("survivals"), nb::arg("computed"), nb::arg("num_free"),
      nb::arg("num_runs"), nb::arg("plain_s"), nb::arg("line"), nb::arg("drafting_s"),
      nb::arg("least_chance"),
      nb::sig(
          "def choose_depths(survivals: collections.abc.Sequence[collections.abc.Sequence[float]], "
          "computed: collections.abc.Sequence[bool], num_free: int, num_runs: int, plain_s: float, "
          "line: collections.abc.Sequence[float], drafting_s: collections.abc.Sequence[float], "
          "least_chance: float) -> tuple[list[int], float, float]"),
      "(depths, expected tokens, seconds): how many tokens to draft for each sequence.");
  nb::class_<StepCurve>(m, "StepCurve",
                        "The time of a step by runs and rows, corrected as steps are measured.")
      .def(nb::init<std::map<int, StepCurve::Points>, std::vector<int>>(), nb::arg("grid"),
           nb::arg("knots"))
      .def("seconds", &curve_seconds, nb::arg("runs"), nb::arg("rows"))
      .def("line", &curve_line, nb::arg("runs"), nb::arg("first"), nb::arg("count"))
      .def("learn", &curve_learn, nb::arg("runs"), nb::arg("rows"), nb::arg("seconds"))
      .def("has_seen", &StepCurve::has_seen, nb::arg("runs"));
}

}  // namespace ridgeline
