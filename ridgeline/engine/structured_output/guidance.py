"""Structured output with llguidance: a derivative-based lexer, an Earley parser, a token trie.

What. JSON schemas, regular expressions, choices and Lark grammars are compiled once. Before each
draw, the parser walks the trie of all tokens and keeps those that some continuation can complete.
Source. Moskal et al., llguidance (2024), https://github.com/guidance-ai/llguidance; the lexer's
derivatives are those of Owens, Reppy and Turon (JFP 2009).

Work is bounded by operation counts: the compiler and every row of a step stop after a fixed number
of operations, and only that request fails (`_LIMITS`; about 0.1 s of compilation, 20 ms per row). A
step is bounded by CPU time: rows whose turn comes after `STEP_S` wait for the next step. Rows that
were cheap go first, and among equals those that have waited. Time decides when a row is sampled,
never what. (The clock of other programs does not count: on a busy machine every row would wait.)

Schemas with many optional properties reach these limits in the middle of an answer. Their width is
bounded, and wide ones are tried out when they are compiled (`_try_out`), so that they are refused
before an answer begins.

Copies of a matcher share its lexer, and so use up its limits (states, expressions) together. An
answer that reaches them starts again with a separate lexer, for which its row waits while another
thread compiles: its failure does not depend on earlier requests with the same grammar.

Compiled grammars are kept within a number and within `MAX_KEPT_BYTES`, by their measured size: a
regular expression of eight characters can take 20 MB. Matchers keep the lexer of their grammar in
memory, and are dropped with it.

Matchers are cached by (grammar, seed, length and a sample of the prompt), each with the output it
has consumed. An output that does not continue it (another request with the same seed, a rejected
draft) starts from a fresh copy, which consumes the whole output. So a matcher is never wrong, at
worst slow. (Hashing all of 32,000 prompt tokens took 0.2 ms for each row and step.)

When it loses. A mask costs tens of microseconds a row and step (more for large vocabularies) on the
engine thread, and so does applying it. Forced tokens are sampled like any other; none are skipped.

Shapes: S sampled rows, R of them with a grammar, V vocabulary, W words with a bit for each token.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output.base import (
    UnmaskedRows,
    follows_draft,
    needs_mask,
    restrict_to,
)
from ridgeline.engine.structured_output.grammar_text import grammar_text, unusable_error
from ridgeline.engine.structured_output.heap import heap_bytes
from ridgeline.engine.structured_output.json_schema import (
    supported_schema,
    widest_schema,
)
from ridgeline.engine.structured_output.repeats import step_fuel
from ridgeline.engine.structured_output.token_bits import (
    allow_only,
    forbid,
    is_allowed,
    new_words,
)
from ridgeline.engine.structured_output.width import Widest
from ridgeline.errors import BadGrammar, BadInput, CannotRun
from ridgeline.records import OutputGrammar

if TYPE_CHECKING:
    import llguidance
    from torch import Tensor

_LOG = logging.getLogger(__name__)

MAX_COMPILED = 32
MAX_KEPT_BYTES = 128 << 20  # of shared lexers, and again of separate ones
UNMEASURED_BYTES = 8 << 20  # of a compiled grammar, where the C library does not tell
MAX_MATCHERS = 1024
MAX_OWN_LEXERS = 32
MAX_JOBS = 8  # compilations of separate lexers that run, wait, or were not fetched yet
STALE_STEPS = 64  # a job that no row has asked for in that many steps is dropped
STEP_S = 0.02  # CPU time for the masks of one step; the row that is under way may take 15 ms more
CHEAP_S = 0.001  # CPU time: a row that took no longer goes first
CONSUMED_AT_ONCE = 256  # tokens
PROMPT_SAMPLE = 64  # evenly spread tokens that distinguish prompts of equal length
MAX_TEXT = 256 << 10  # characters of one grammar; the server's limit is lower
WIDE = 100  # optional properties at one place, from which a schema is tried out
TRIED_TOKENS = 32
_ALLOWED = b"\xc8"  # in the library's bytes, one for each token

_LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,  # schemas take up to 100,000
    "step_lexer_fuel": 100_000,
    "step_max_items": 5_000,  # JSON schemas take hundreds; ambiguous rules take 0.3 s for 25,000
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

_SCHEMA_KINDS = ("json", "call", "answer_or_calls")
_SCHEMA_WORK = 290_000_000
"""Items of a step times items of a row, to which the time of a schema's mask is proportional: about
20 ms. (Ambiguous rules, which schemas have not, take a hundred times as long.)"""

_PARSER_LIMIT = re.compile("(?i)too many items|current row has")
"""Limits of a copy's own parser, which another lexer would reach at the same place."""

_Key = tuple[OutputGrammar, int, int]


class _CompiledGrammar(NamedTuple):
    """A compiled grammar and its memory."""

    matcher: llguidance.LLMatcher
    num_bytes: int


@dataclass(slots=True)
class _Job:
    """The compilation of a separate lexer, and the latest step in which its row asked for it."""

    result: Future[_CompiledGrammar]
    asked_in_step: int


class _Turn(IntEnum):
    """When a row's mask is computed within a step."""

    AT_ONCE = 0  # the row cannot wait
    CHEAP_LATE = 1
    CHEAP = 2
    COSTLY_LATE = 3
    COSTLY = 4

    @property
    def is_costly(self) -> bool:
        return self >= _Turn.COSTLY_LATE


class _NotYetError(Exception):
    """The mask of a row is not ready: the row has to wait for another step."""


class _MatcherState:
    """A matcher and the output it has consumed.

    End-of-sequence tokens, which a draft may contain before its last token, are not part of the
    grammar: after one, only the tokens in `ends` may follow.
    """

    def __init__(
        self,
        structured: OutputGrammar,
        matcher: llguidance.LLMatcher,
        ends: Sequence[int],
        *,
        own_bytes: int | None = None,
    ) -> None:
        self._structured, self.matcher, self._ends = structured, matcher, ends
        self.own_bytes = own_bytes or 0  # of a separate lexer
        # A separate lexer: no other state has used up any of its limits.
        self.has_own_lexer = own_bytes is not None
        self.consumed: list[int] = []
        self.has_ended = False
        self.cost_s: float | None = None  # of the latest mask

    def is_prefix_of(self, output: Sequence[int]) -> bool:
        return list(output[: len(self.consumed)]) == self.consumed

    def write_mask(self, words_W: Tensor, output: Sequence[int], end_s: float) -> None:
        """Write which tokens may follow `output`.

        Raises BadInput if the grammar exceeds a limit there, _NotYetError if a long output is not
        consumed by `end_s`.
        """
        began_s = time.thread_time()
        while len(self.consumed) < len(output):
            self._catch_up(output[len(self.consumed) :][:CONSUMED_AT_ONCE])
            if len(self.consumed) < len(output) and time.thread_time() > end_s:
                raise _NotYetError
        self._write(words_W)
        self.cost_s = time.thread_time() - began_s

    def _catch_up(self, tokens: Sequence[int]) -> None:
        rest = list(tokens)
        first_end = next((i for i, token in enumerate(rest) if token in self._ends), len(rest))
        num_inside = 0 if self.has_ended else first_end
        self._consume(rest[:num_inside])  # in one call: a fresh state has a whole answer to consume
        for token in rest[num_inside:]:
            self.has_ended |= token in self._ends and self.matcher.is_accepting()
            if not self.has_ended:
                self._consume([token])
            elif token not in self._ends:
                raise ArithmeticError(f"the grammar is complete, but token {token} follows")
        self.consumed += rest

    def _consume(self, tokens: list[int]) -> None:
        if tokens and not self.matcher.consume_tokens(tokens):
            why = self.matcher.get_error()
            if "satisfy the grammar" in why:  # a token that no mask would have allowed
                raise ArithmeticError(f"the grammar rejects the output: {why[:200]}")
            raise unusable_error(self._structured, why)

    def _write(self, words_W: Tensor) -> None:
        if self.has_ended:
            allow_only(words_W, self._ends)
            return
        self.matcher.unsafe_compute_mask_ptr(words_W.data_ptr(), words_W.nbytes)
        if self.matcher.is_error():
            raise unusable_error(self._structured, self.matcher.get_error())


class GuidanceMasks:
    """Compiles grammars with llguidance and masks logits. `prepare` may run on any thread."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._eos = list(eos_token_ids)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[OutputGrammar, _CompiledGrammar] = OrderedDict()
        self._num_evicted = self._num_evicted_seen = 0
        self._states: OrderedDict[_Key, _MatcherState] = OrderedDict()
        self._compiler: ThreadPoolExecutor | None = None
        self._jobs: OrderedDict[_Key, _Job] = OrderedDict()
        self._step = 0
        self._late: frozenset[_Key] = frozenset()  # keys of the rows that the latest step left

    def warm_up(self) -> None:
        """Build the trie of the vocabulary.

        The library keeps Python's lock meanwhile, 2 s for 256,000 tokens: once requests are being
        served, all of them would stand still. What fails here fails again, and is reported, with
        the first grammar.
        """
        try:
            with self._compiling:
                self._trie()
        except Exception as error:
            _LOG.warning("structured output is not available: %s", error)

    def prepare(self, structured: OutputGrammar) -> None:
        self._keep_compiled(structured)

    def apply(self, logits_SV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
        if not needs_mask(points):
            return logits_SV
        logits_SV = logits_SV.clone()
        self.apply_in_time(logits_SV, points, [False] * len(points))
        return logits_SV

    def apply_in_time(
        self, logits_SV: Tensor, points: Sequence[SamplePoint], can_wait: Sequence[bool]
    ) -> UnmaskedRows:
        if not needs_mask(points):
            return UnmaskedRows()
        restrict_to(logits_SV, points)
        rows = self._in_order(points, can_wait)
        words_RW = new_words(len(rows), self._vocab_size)
        end_s = time.thread_time() + STEP_S
        self._step += 1
        late: dict[int, _Key] = {}
        failed: dict[int, Exception] = {}
        written: list[int] = []
        tried: set[bool] = set()  # whether costly, of the rows that could have waited
        unreachable: set[int] = set()  # rows after drafts that the grammar forbids
        for row, key, turn in rows:
            point, words_W = points[row], words_RW[len(written)]
            # Rows of a draft cannot wait. Rows that can may look alike: requests with one seed.
            if not turn and row > 0 and follows_draft(points[row - 1], point):
                has_mask = written[-1:] == [row - 1]
                token = point.history[-1]
                if row - 1 in unreachable or (
                    has_mask and not is_allowed(words_RW[len(written) - 1], token)
                ):
                    unreachable.add(row)
                    continue
            if turn:
                if turn.is_costly in tried and time.thread_time() > end_s:
                    late[row] = key
                    continue
                tried.add(turn.is_costly)
            try:
                self._write_mask(words_W, key, point, end_s if turn else inf)
            except _NotYetError:
                late[row] = key
            except (ArithmeticError, BadInput) as error:
                if not turn:
                    raise
                failed[row] = error
            else:
                written.append(row)
        forbid(logits_SV, written, words_RW)
        self._late = frozenset(late.values())
        return UnmaskedRows(frozenset(late), failed)

    def _in_order(
        self, points: Sequence[SamplePoint], can_wait: Sequence[bool]
    ) -> list[tuple[int, _Key, _Turn]]:
        """The restricted rows, with their keys, in the order in which masks are computed.

        Of the cheap rows and of the costly ones at least one is tried in each step, those that have
        waited first. Rows that cannot wait, among them those of drafts, keep their order.
        """

        def turn(row: int, key: _Key) -> _Turn:
            if not can_wait[row]:
                return _Turn.AT_ONCE
            state = self._states.get(key)
            is_cheap = state is not None and (state.cost_s or inf) <= CHEAP_S
            if key in self._late:
                return _Turn.CHEAP_LATE if is_cheap else _Turn.COSTLY_LATE
            return _Turn.CHEAP if is_cheap else _Turn.COSTLY

        rows = [
            (row, _key_of(point, point.sampling.structured))
            for row, point in enumerate(points)
            if point.sampling.structured is not None
        ]
        ranked = sorted(((turn(row, key), row, key) for row, key in rows), key=lambda own: own[:2])
        return [(row, key, own_turn) for own_turn, row, key in ranked]

    def _write_mask(self, words_W: Tensor, key: _Key, point: SamplePoint, end_s: float) -> None:
        output = point.history[point.num_prompt :]
        state = self._state_for(key, output, can_wait=end_s < inf)
        try:
            state.write_mask(words_W, output, end_s)
            return
        except (ArithmeticError, BadInput) as error:
            self._forget(key, state)
            if state.has_own_lexer or _PARSER_LIMIT.search(str(error)):
                raise
        state = self._states[key] = self._own_state(key, can_wait=end_s < inf)
        self._limit_own_lexers()
        try:
            state.write_mask(words_W, output, end_s)
        except (ArithmeticError, BadInput):
            self._forget(key, state)
            raise

    def _own_state(self, key: _Key, *, can_wait: bool) -> _MatcherState:
        """A state with a separate lexer, which another thread compiles."""
        job = self._jobs.get(key)
        if job is None:
            self._drop_stale_jobs()
            if can_wait and len(self._jobs) >= MAX_JOBS:
                raise _NotYetError
            if self._compiler is None:
                self._compiler = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-grammar")
            job = self._jobs[key] = _Job(self._compiler.submit(self._compile, key[0]), self._step)
        job.asked_in_step = self._step
        if can_wait and not job.result.done():
            raise _NotYetError
        self._jobs.pop(key, None)
        compiled = job.result.result()
        return _MatcherState(key[0], compiled.matcher, self._eos, own_bytes=compiled.num_bytes)

    def _drop_stale_jobs(self) -> None:
        """Drop the jobs of rows that have left: their clients went away, or they were preempted."""
        for key, job in list(self._jobs.items()):
            if job.asked_in_step < self._step - STALE_STEPS:
                job.result.cancel()
                del self._jobs[key]

    def _limit_own_lexers(self) -> None:
        """Drop the states with separate lexers that were not used for the longest time."""
        num, num_bytes = 0, 0
        for key, state in reversed(list(self._states.items())):
            if state.has_own_lexer:
                num, num_bytes = num + 1, num_bytes + state.own_bytes
                if num > 1 and (num > MAX_OWN_LEXERS or num_bytes > MAX_KEPT_BYTES):
                    del self._states[key]

    def _drop_states_of_evicted(self) -> None:
        """Drop the states whose grammar is kept no longer: they would keep it in memory."""
        with self._lock:
            if self._num_evicted == self._num_evicted_seen:
                return
            self._num_evicted_seen, kept = self._num_evicted, frozenset(self._compiled)
        for key, state in list(self._states.items()):
            if not state.has_own_lexer and key[0] not in kept:
                del self._states[key]

    def _forget(self, key: _Key, state: _MatcherState) -> None:
        """Drop a failed matcher: neither it nor others that share its lexer recover."""
        self._states.pop(key, None)
        if not state.has_own_lexer:
            with self._lock:
                self._compiled.pop(key[0], None)

    def _state_for(self, key: _Key, output: Sequence[int], *, can_wait: bool) -> _MatcherState:
        self._drop_states_of_evicted()
        state = self._states.get(key)
        if state is None or not state.is_prefix_of(output):
            compiled = self._find_compiled(key[0])
            if compiled is None:
                state = self._own_state(key, can_wait=can_wait)
            else:
                state = _MatcherState(key[0], compiled.matcher.deep_copy(), self._eos)
            self._states[key] = state
            self._limit_own_lexers()
        self._states.move_to_end(key)
        while len(self._states) > MAX_MATCHERS:
            self._states.popitem(last=False)
        return state

    def _keep_compiled(self, structured: OutputGrammar) -> None:
        """Compile the grammar if it is not kept; drop what was not prepared for the longest time.

        Compilation does not block lookups, so the engine thread never waits. Requests that come
        at once with the same grammar compile it once.
        """
        compiled = self._find_compiled(structured)
        if compiled is None:
            with self._compiling:
                compiled = self._find_compiled(structured) or self._compile(structured)
        with self._lock:
            self._compiled[structured] = compiled
            self._compiled.move_to_end(structured)
            num_bytes = sum(own.num_bytes for own in self._compiled.values())
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_COMPILED or num_bytes > MAX_KEPT_BYTES
            ):
                num_bytes -= self._compiled.popitem(last=False)[1].num_bytes
                self._num_evicted += 1

    def _find_compiled(self, structured: OutputGrammar) -> _CompiledGrammar | None:
        with self._lock:
            return self._compiled.get(structured)

    def _compile(self, structured: OutputGrammar) -> _CompiledGrammar:
        if len(structured.text) > MAX_TEXT:
            raise BadGrammar(
                "the grammar is too long",
                value=f"{len(structured.text)} characters",
                limit=MAX_TEXT,
            )
        library, trie = _library(), self._trie()
        grammar = grammar_text(library, structured)
        widest = _widest(structured)
        limits = library.LLParserLimits(**_limits_of(structured, widest.width))
        before = heap_bytes()
        matcher: llguidance.LLMatcher = library.LLMatcher(trie, grammar, log_level=0, limits=limits)
        _check_first_step(structured, matcher)
        after = heap_bytes()
        if widest.width > WIDE:
            _try_out(structured, widest, trie)
        if before is None or after is None:
            return _CompiledGrammar(matcher, UNMEASURED_BYTES)
        return _CompiledGrammar(matcher, max(after - before, 0))

    def _trie(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = _library().LLTokenizer(
                self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos
            )
        return self._tokenizer


def _key_of(point: SamplePoint, structured: OutputGrammar) -> _Key:
    sample = point.history[: point.num_prompt : point.num_prompt // PROMPT_SAMPLE + 1]
    return structured, point.seed, hash((point.num_prompt, sample))


def _check_first_step(structured: OutputGrammar, matcher: llguidance.LLMatcher) -> None:
    """Compute a first mask, with the same call that steps make.

    An empty language is only detected here. Limits of the lexer are shared by all copies and only
    reported to the copy after the one that exceeded them, hence two copies.
    """
    for copy in (matcher.deep_copy(), matcher.deep_copy()):
        if not matcher.is_error():
            copy.compute_logit_bias()
        if copy.is_error():
            raise unusable_error(structured, copy.get_error())


def _widest(structured: OutputGrammar) -> Widest:
    if structured.kind not in _SCHEMA_KINDS:
        return Widest(0, {})
    return widest_schema(structured.kind, structured.text)


def _try_out(structured: OutputGrammar, widest: Widest, trie: llguidance.LLTokenizer) -> None:
    """Compute masks inside the widest object of a wide schema, up to its second property.

    How much work they are depends on the vocabulary: on how many tokens end one property and begin
    the next.
    """
    library = _library()
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(
            supported_schema(json.dumps(widest.schema)), overrides={"whitespace_pattern": " ?"}
        )
    except ValueError:  # it refers to another place of the document, which it cannot without it
        return
    limits = library.LLParserLimits(**_limits_of(structured, widest.width))
    matcher = library.LLMatcher(trie, grammar, log_level=0, limits=limits)
    marks = [token for mark in '":,{[' if len(own := trie.tokenize_str(mark)) == 1 for token in own]
    for _ in range(TRIED_TOKENS):
        allowed = matcher.compute_logit_bias()
        if matcher.is_error():
            break
        first = next((token for token in marks if allowed[token]), None)
        token = allowed.find(_ALLOWED) if first is None else first
        if token < 0 or token in trie.eos_tokens or not matcher.consume_tokens([token]):
            break
    if matcher.is_error() and _PARSER_LIMIT.search(matcher.get_error()):
        raise unusable_error(
            structured,
            f"{widest.width} optional properties may come next at one place, which is more work"
            " than the masks of a step may take with the vocabulary of this model",
        )


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise CannotRun(
            "structured output needs the package llguidance", fix="pip install llguidance"
        ) from None
    return llguidance


def _limits_of(structured: OutputGrammar, width: int) -> dict[str, int]:
    """The limits for a grammar with a schema of the given width, 0 if it has none."""
    if structured.kind in _SCHEMA_KINDS:
        row = max(_LIMITS["max_items_in_row"], 4 * width + 400)
        return {**_LIMITS, "max_items_in_row": row, "step_max_items": _SCHEMA_WORK // row}
    if structured.kind not in ("regex", "grammar"):
        return _LIMITS
    fuel = step_fuel(_LIMITS["step_lexer_fuel"], structured.text)
    return {**_LIMITS, "step_lexer_fuel": fuel}
