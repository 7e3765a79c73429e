// Python face of drafts.h and automaton.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "automaton.h"
#include "drafts.h"
#include "isa.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

// A list or a tuple as it lies; anything else as a list of what it yields.
class Items {
 public:
  explicit Items(nb::handle sequence) : fast_(nb::steal(PySequence_Fast(sequence.ptr(), "a sequence is needed"))) {
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
    std::vector<Token> found;
    for (int i = first; i < std::min(end, size_); ++i) found.push_back((*this)[i]);
    return found;
  }

 private:
  nb::object fast_;
  int size_ = 0;
};

template <class T>
nb::object tuple_of(const std::vector<T>& numbers) {
  nb::object found = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i)
    PyTuple_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  return found;
}

class PromptLookup {
 public:
  PromptLookup(int shortest, int longest) : shortest_(shortest), longest_(longest) {
    require(shortest > 0 && shortest <= longest, "grams have at least one token, the longest no fewer than the shortest");
  }

  nb::object look(int64_t seq, nb::handle tokens, int num_prompt, int most) {
    const Items items(tokens);
    auto found = texts_.try_emplace(seq, shortest_, longest_).first;
    const int known = static_cast<int>(found->second.tokens().size());
    if (known > items.size() || (known && found->second.tokens().back() != items[known - 1]))
      found->second = TextIndex(shortest_, longest_);  // another text
    TextIndex& text = found->second;
    for (int i = static_cast<int>(text.tokens().size()); i < items.size(); ++i) text.tokens().push_back(items[i]);
    text.read();
    const LookedUp guess = text.look(num_prompt, most);
    if (guess.tokens.empty()) return nb::none();
    return nb::make_tuple(tuple_of(guess.tokens), tuple_of(guess.kinds));
  }

  void forget(int64_t seq) { texts_.erase(seq); }
  int num_texts() const { return static_cast<int>(texts_.size()); }

 private:
  int shortest_, longest_;
  std::unordered_map<int64_t, TextIndex> texts_;
};

GuessRecord record(std::vector<double> priors, double prior, double like_others, double fade_all, double fade_own,
                   double least) {
  require(!priors.empty(), "every kind needs a prior");
  return GuessRecord(std::move(priors), {prior, like_others, fade_all, fade_own, least});
}

void keep(GuessRecord& self, int64_t seq, int num_known, std::vector<Token> tokens, std::vector<int> kinds) {
  for (int kind : kinds) require(kind >= 0, "a kind is not negative");
  self.keep(seq, num_known, {std::move(tokens), std::move(kinds)});
}

void compare(GuessRecord& self, int64_t seq, nb::handle tokens) {
  const Items items(tokens);
  int start = 0;
  LookedUp guess;
  if (!self.pending(seq, items.size(), &start, &guess)) return;
  self.judge(seq, guess, items.from(start, start + static_cast<int>(guess.tokens.size())));
}

void feed(Automaton& self, nb::handle tokens) {
  const Items items(tokens);
  for (int i = 0; i < items.size(); ++i) self.feed(items[i]);
}

// A reader of one sequence's own tokens, as far as they were read.
struct Seat {
  Reader reader;
  int num_read;
};

// The seat's text goes on to the end of `tokens`; of one that became shorter, from its last `warm` tokens on.
void read_on(const Automaton& self, Seat& seat, const Items& items, int warm) {
  if (seat.num_read > items.size()) seat = {Reader(), std::max(0, items.size() - warm)};
  self.repair(seat.reader);
  for (; seat.num_read < items.size(); ++seat.num_read) self.follow(seat.reader, items[seat.num_read]);
}

// (length of the match, what followed it the last time, up to `most` tokens or twice its length, as far as no `stop` is
// among them) or None where the match is not longer than `longer_than`, or nothing followed.
nb::object look(const Automaton& self, Seat& seat, nb::handle tokens, int warm, int longer_than, int most, Token stop) {
  read_on(self, seat, Items(tokens), warm);
  const int length = seat.reader.length;
  if (!length || length <= longer_than) return nb::none();
  const std::vector<Token>& text = self.text();
  const int first = self.place(seat.reader) + 1;
  const int end = std::min(static_cast<int>(text.size()), first + std::min(most, 2 * length));
  std::vector<Token> found;
  for (int i = first; i < end && text[i] != stop; ++i) found.push_back(text[i]);
  if (found.empty()) return nb::none();
  return nb::make_tuple(length, tuple_of(found));
}

nb::tuple choose(const std::vector<std::vector<double>>& survivals, const std::vector<bool>& computed, int num_free,
                 int num_runs, double plain_s, const std::vector<double>& line, const std::vector<double>& drafting_s,
                 double least) {
  require(survivals.size() == computed.size(), "every sequence needs both, chances and who drafts");
  const Depths found = choose_depths({survivals, computed, line, drafting_s, num_free, num_runs, plain_s, least});
  return nb::make_tuple(found.depths, found.tokens, found.seconds);
}

constexpr int kMostRows = 1 << 24;  // of a step: a curve has a number for each

void check_rows(int runs, int rows, int more = 0) {
  require(runs > 0 && rows >= 0 && more >= 0, "a step has runs and rows");
  require(rows <= kMostRows && more <= kMostRows, "a step has fewer rows");
}

double curve_seconds(StepCurve& self, int runs, int rows) {
  check_rows(runs, rows);
  return self.seconds(runs, rows);
}

std::vector<double> curve_line(StepCurve& self, int runs, int first, int count) {
  check_rows(runs, first, count);
  require(first > runs, "drafts add rows to those of the runs");
  return self.line(runs, first, count);
}

void curve_learn(StepCurve& self, int runs, int rows, double seconds) {
  check_rows(runs, rows);
  self.learn(runs, rows, seconds);
}

}  // namespace

void bind_drafts(nb::module_& m) {
  nb::class_<PromptLookup>(m, "PromptLookup", "What a sequence's own text says comes next (speculate/ngram.py).")
      .def(nb::init<int, int>(), nb::arg("shortest"), nb::arg("longest"))
      .def("look", &PromptLookup::look, nb::arg("seq_id"), nb::arg("tokens"), nb::arg("num_prompt"), nb::arg("most"),
           "(tokens, kinds) of `most` tokens, or None where no gram that ends the text was in it before.")
      .def("forget", &PromptLookup::forget, nb::arg("seq_id"))
      .def_prop_ro("num_texts", &PromptLookup::num_texts);
  nb::class_<Seat>(m, "Seat", "Where a sequence stands in an automaton.")
      .def("__init__", [](Seat* at, int num_read) { new (at) Seat{Reader(), num_read}; }, nb::arg("num_read"))
      .def_prop_ro("length", [](const Seat& seat) { return seat.reader.length; }, "Tokens of its tail that occur there.");
  nb::class_<Automaton>(m, "Automaton", "A suffix automaton of a text (speculate/suffix.py).")
      .def(nb::init<>())
      .def("feed", &feed, nb::arg("tokens"), "The text goes on with these.")
      .def("look", &look, nb::arg("seat"), nb::arg("tokens"), nb::arg("warm"), nb::arg("longer_than"), nb::arg("most"),
           nb::arg("stop"), "(length, tokens): how long a tail of `tokens` occurs, and what followed it; or None.")
      .def_prop_ro("num_states", &Automaton::num_states)
      .def_prop_ro("num_tokens", [](const Automaton& self) { return self.text().size(); });
  nb::class_<GuessRecord>(m, "GuessRecord", "How good guesses were, kind by kind (speculate/shadows.py).")
      .def(nb::new_(&record), nb::arg("priors"), nb::arg("prior_weight"), nb::arg("like_others"), nb::arg("fade_all"),
           nb::arg("fade_own"), nb::arg("least_chance"))
      .def("chance", &GuessRecord::chance, nb::arg("kind"))
      .def("counts", &GuessRecord::counts, nb::arg("kind"))
      .def("survivals", &GuessRecord::survivals, nb::arg("seq_id"), nb::arg("kinds"))
      .def("keep", &keep, nb::arg("seq_id"), nb::arg("num_known"), nb::arg("tokens"), nb::arg("kinds"))
      .def("compare", &compare, nb::arg("seq_id"), nb::arg("tokens"))
      .def("forget", &GuessRecord::forget, nb::arg("seq_id"))
      .def_prop_ro("num_pending", &GuessRecord::num_pending);
  m.def("choose_depths", &choose, nb::arg("survivals"), nb::arg("computed"), nb::arg("num_free"), nb::arg("num_runs"),
        nb::arg("plain_s"), nb::arg("line"), nb::arg("drafting_s"), nb::arg("least_chance"),
        "(depths, expected tokens, seconds) (speculate/choose.py).");
  nb::class_<StepCurve>(m, "StepCurve", "What steps take (speculate/cost.py).")
      .def(nb::init<std::map<int, StepCurve::Points>, std::vector<int>>(), nb::arg("grid"), nb::arg("knots"))
      .def("seconds", &curve_seconds, nb::arg("runs"), nb::arg("rows"))
      .def("line", &curve_line, nb::arg("runs"), nb::arg("first"), nb::arg("count"))
      .def("learn", &curve_learn, nb::arg("runs"), nb::arg("rows"), nb::arg("seconds"))
      .def("has_seen", &StepCurve::has_seen, nb::arg("runs"));
}

}  // namespace ridgeline
