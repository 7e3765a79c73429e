"""Structured output by llguidance: a derivative-based lexer under an Earley parser, over a trie of
the vocabulary.

What: JSON schemas, regular expressions, choices and Lark grammars are compiled once; before each
draw the parser walks the trie of all tokens and keeps those that some continuation can complete.
Source: Moskal et al., llguidance (2024), https://github.com/guidance-ai/llguidance; the lexer's
derivatives are those of Owens, Reppy and Turon (JFP 2009).

Work is bounded by fuel, not by a clock: the compiler and every step stop after a fixed number of
operations and the request fails alone (`_LIMITS`; about 0.1 s of compiling, 10 ms of a step).

Copies of a matcher share its lexer, whose limits (states, expressions) they use up together. An
answer that comes to their end begins again with a lexer of its own, so that whether it fails is
its own affair and not that of who asked for the same grammar before.

Matchers are kept by (grammar, seed, length and a sample of the prompt): each remembers which output
it has consumed. An output that is not a continuation of it (another request with the same seed; a
draft that was rejected) starts a fresh copy and consumes it all. So a matcher is never wrong, at
worst slow. (All of 32,000 tokens took 0.2 ms to hash, for each row and step.)

When it loses: a mask costs tens of microseconds per row and step (more on large vocabularies), on
the engine thread. Forced tokens are sampled like any other; nothing is skipped ahead.

Shapes: S rows that sample, V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output.base import follows_draft, needs_mask, restrict_to
from ridgeline.errors import BadInput, CannotRun
from ridgeline.records import OutputGrammar

if TYPE_CHECKING:
    import llguidance
    from torch import Tensor

MAX_COMPILED = 128
MAX_MATCHERS = 1024
MAX_CHOICES = 2048
PROMPT_SAMPLE = 64  # so many tokens, spread evenly, tell prompts of one length apart
MAX_TEXT = 256 << 10  # characters of one grammar; the server's own cap is lower

_LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

# White space between JSON's signs, as models write it: nothing (`{"a":1}`), a blank or two (as
# Python's json.dumps, and so most chat templates), or a new line and an indentation, 32 levels of
# two blanks deep. Anything freer is room for a model to write blanks instead of an answer.
_JSON = {"whitespace_pattern": r"[\x20\x09]{0,2}(\r?\n[\x20\x09]{0,64})?"}
# Of a call nobody sees the layout: a weak model would spend its tokens on indentation.
_CALL = {"whitespace_pattern": r"\x20?"}

_Key = tuple[OutputGrammar, int, int]


class _Walk:
    """A matcher and the output that it has consumed. The end of an answer, which a draft may hold
    before its last token, is none of the grammar's tokens: behind it only `ends` may come."""

    def __init__(
        self,
        structured: OutputGrammar,
        matcher: llguidance.LLMatcher,
        ends: Sequence[int],
        *,
        is_alone: bool = False,
    ) -> None:
        self._structured, self.matcher, self._ends = structured, matcher, ends
        self.is_alone = is_alone  # no other walk has used up any of its lexer's limits
        self.consumed: list[int] = []
        self.has_ended = False

    def follows(self, output: Sequence[int]) -> bool:
        return list(output[: len(self.consumed)]) == self.consumed

    def forbidden_behind(self, output: Sequence[int], width: int) -> Tensor:
        """Whether each of `width` tokens may not come behind `output`. bool_V. BadInput where the
        grammar is past a limit there."""
        self._catch_up(output)
        return self._forbidden(width)

    def _catch_up(self, output: Sequence[int]) -> None:
        rest = list(output[len(self.consumed) :])
        first_end = next((i for i, token in enumerate(rest) if token in self._ends), len(rest))
        num_said = 0 if self.has_ended else first_end
        self._consume(rest[:num_said])  # in one call: a fresh walk has all of an answer before it
        for token in rest[num_said:]:
            self.has_ended |= token in self._ends and self.matcher.is_accepting()
            if not self.has_ended:
                self._consume([token])
            elif token not in self._ends:
                raise ArithmeticError(f"the grammar has ended; token {token} came behind it")
        self.consumed += rest

    def _consume(self, tokens: list[int]) -> None:
        if tokens and not self.matcher.consume_tokens(tokens):
            why = self.matcher.get_error()
            if "satisfy the grammar" in why:  # no mask would have let that token come
                raise ArithmeticError(f"the grammar stopped: {why[:200]}")
            raise _refused(self._structured, why)

    def _forbidden(self, width: int) -> Tensor:
        if self.has_ended:
            forbidden_V = torch.ones(width, dtype=torch.bool)
            forbidden_V[list(self._ends)] = False
            return forbidden_V
        allowed = self.matcher.compute_logit_bias()  # a byte per token, 0 where forbidden
        if self.matcher.is_error():
            raise _refused(self._structured, self.matcher.get_error())
        return torch.frombuffer(bytearray(allowed), dtype=torch.uint8)[:width] == 0


class GuidanceMasks:
    """See `ridgeline.engine.structured_output.base.TokenMasks`. `prepare` may run on any thread."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_json, self._vocab_size = tokenizer_json, vocab_size
        self._eos = list(eos_token_ids)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[OutputGrammar, llguidance.LLMatcher] = OrderedDict()
        self._walks: OrderedDict[_Key, _Walk] = OrderedDict()

    def prepare(self, structured: OutputGrammar) -> None:
        self._matcher_of(structured)

    def apply(self, logits_SV: Tensor, at: Sequence[SamplePoint]) -> Tensor:
        if not needs_mask(at):
            return logits_SV
        logits_SV = logits_SV.clone()
        restrict_to(logits_SV, at)
        unreachable = False
        for row, spot in enumerate(at):
            if spot.sampling.structured is not None:
                drafted = row > 0 and follows_draft(at[row - 1], spot)
                unreachable = drafted and (
                    unreachable or bool(logits_SV[row - 1, spot.history[-1]] == -torch.inf)
                )
                if unreachable:
                    continue
                forbidden_V = self._forbidden(spot, spot.sampling.structured, logits_SV.shape[1])
                logits_SV[row].masked_fill_(forbidden_V.to(logits_SV.device), -torch.inf)
        return logits_SV

    def _forbidden(self, at: SamplePoint, structured: OutputGrammar, width: int) -> Tensor:
        sample = at.history[: at.num_prompt : at.num_prompt // PROMPT_SAMPLE + 1]
        key = (structured, at.seed, hash((at.num_prompt, sample)))
        output = at.history[at.num_prompt :]
        walk = self._walk(key, output)
        try:
            return walk.forbidden_behind(output, width)
        except (ArithmeticError, BadInput):
            self._forget(key)
            if walk.is_alone:
                raise
        walk = _Walk(structured, self._compile(structured), self._eos, is_alone=True)
        found = walk.forbidden_behind(output, width)
        self._walks[key] = walk
        return found

    def _forget(self, key: _Key) -> None:
        """A matcher that has failed does not recover, and neither do others with its lexer."""
        del self._walks[key]
        with self._lock:
            self._compiled.pop(key[0], None)

    def _walk(self, key: _Key, output: Sequence[int]) -> _Walk:
        walk = self._walks.get(key)
        if walk is None or not walk.follows(output):
            fresh = self._matcher_of(key[0]).deep_copy()
            walk = self._walks[key] = _Walk(key[0], fresh, self._eos)
        self._walks.move_to_end(key)
        while len(self._walks) > MAX_MATCHERS:
            self._walks.popitem(last=False)
        return walk

    def _matcher_of(self, structured: OutputGrammar) -> llguidance.LLMatcher:
        """Compiling holds up no lookup: the engine thread never waits for a grammar it has."""
        with self._lock:
            found = self._compiled.get(structured)
        if found is None:
            with self._compiling:
                found = self._compile(structured)
        with self._lock:
            self._compiled[structured] = found
            self._compiled.move_to_end(structured)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, structured: OutputGrammar) -> llguidance.LLMatcher:
        if len(structured.text) > MAX_TEXT:
            raise BadInput(
                "the grammar is too long",
                value=f"{len(structured.text)} characters",
                limit=MAX_TEXT,
            )
        library = _library()
        if self._tokenizer is None:
            self._tokenizer = library.LLTokenizer(
                self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos
            )
        limits = library.LLParserLimits(**_LIMITS)
        matcher: llguidance.LLMatcher = library.LLMatcher(
            self._tokenizer, _grammar(library, structured), log_level=0, limits=limits
        )
        _check_first_step(structured, matcher)
        return matcher


def _check_first_step(structured: OutputGrammar, matcher: llguidance.LLMatcher) -> None:
    """By the very call that steps make. A language without words shows only here, and a lexer that
    is past its limits, which all copies share, only to the copy behind the one that took it there.
    """
    for copy in (matcher.deep_copy(), matcher.deep_copy()):
        if not matcher.is_error():
            copy.compute_logit_bias()
        if copy.is_error():
            raise _refused(structured, copy.get_error())


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise CannotRun(
            "structured output needs the package llguidance", fix="pip install llguidance"
        ) from None
    return llguidance


def _grammar(library: Any, structured: OutputGrammar) -> str:
    """llguidance's own form. Only what is sure to be a ValueError of the library is caught."""
    matcher, text = library.LLMatcher, structured.text
    try:
        if structured.kind in ("json", "call"):
            layout = _JSON if structured.kind == "json" else _CALL
            return str(matcher.grammar_from_json_schema(text, overrides=layout))
        if structured.kind == "regex":
            return str(matcher.grammar_from_regex(text))
        if structured.kind == "choice":
            return str(matcher.grammar_from_lark(_choices(text)))
        return str(matcher.grammar_from_lark(text))
    except (ValueError, RecursionError) as error:
        raise _refused(structured, str(error)) from None


def _choices(text: str) -> str:
    """A Lark grammar of alternatives, which are one terminal: as rules each would be an item of
    the parser's. A JSON string is a Lark string too, but for the one sign that JSON lets stand."""
    options = dict.fromkeys(json.loads(text))
    if not options or len(options) > MAX_CHOICES:
        raise ValueError(f"{len(options)} choices, where 1 to {MAX_CHOICES} are allowed")
    written = (json.dumps(option, ensure_ascii=False) for option in options)
    return "start: CHOICE\nCHOICE: " + " | ".join(written).replace("\x7f", r"\u007f")


def _refused(structured: OutputGrammar, why: str) -> BadInput:
    first = why.strip().splitlines()[0] if why.strip() else "it cannot be compiled"
    fix = "mend it, or make it smaller"
    if "coerce_one_of" in first:  # a switch of the library's that nobody has here
        first, fix = "oneOf is supported where no value fits two of its branches", "write anyOf"
    return BadInput(
        f"the {structured.kind} for structured output is not usable", limit=first[:300], fix=fix
    )
