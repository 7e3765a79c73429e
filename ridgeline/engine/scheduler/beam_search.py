"""Beam search: which continuations of a request's beams live on, and which outputs are the best.

What. Every step the beams' likeliest continuations are ranked together by the sum of their
log-probabilities. The best `width` that do not end the output become the beams of the next step;
of the best `width`, those that end it are finished, scored by sum / length^length_penalty. The
search ends when no beam can beat the finished outputs (`early_stopping` False: as it stands now;
"never": even at the greatest length), as soon as `width` are finished (True), or at the length
limit.

Source. transformers' `generate(num_beams=…)`, whose rules these are. Beams share the blocks of
their common beginning (fork and copy-on-write, vLLM's PagedAttention, Kwon et al. 2023).

Invariant. The outputs and their order are those of transformers, near ties apart, and do not depend
on how the beams were batched or preempted.

When it loses. It costs `width` sequences, and on open-ended text the likeliest output is often
bland or repetitive. Nothing can be streamed before the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ridgeline.records import BeamSearch, FinishReason, TokenLogprobs


class Continuation(NamedTuple):
    """A token after beam `parent`, and the sum of the log-probabilities with it."""

    score: float
    parent: int
    token: int


Beams = Mapping[int, Continuation]
"""The beams of the next step by choice index."""


class FinishedOutput(NamedTuple):
    """A complete output; `score` is penalised by its length, `logprobs` are there on request."""

    score: float
    tokens: tuple[int, ...]
    reason: FinishReason
    stop_reason: int | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class BeamState:
    """The beams of one request by choice index, and its finished outputs, best first.

    `max_tokens` bounds the output. `eos` and `stops` end it; the latter are reported. With
    `num_logprobs`, outputs have the log-probabilities of their tokens and of as many likeliest.
    """

    def __init__(
        self,
        params: BeamSearch,
        width: int,
        max_tokens: int,
        eos: Collection[int],
        stops: Collection[int],
        num_logprobs: int | None = None,
    ) -> None:
        self.width, self._params, self._max_tokens = width, params, max_tokens
        self._eos, self._stops = frozenset(eos), frozenset(stops)
        self.num_candidates = max(2, 1 + len(self._eos | self._stops)) * width
        self.num_top = max(self.num_candidates, num_logprobs or 0)
        self._num_logprobs = num_logprobs
        self._logprobs: dict[int, tuple[TokenLogprobs, ...]] = {0: ()}
        self.finished: list[FinishedOutput] = []
        self.scores: dict[int, float] = {0: 0.0}
        self._results: dict[int, tuple[tuple[int, float], ...]] = {}
        self._ranked_results = self._results  # those of the last step
        self._can_improve, self._num_steps = True, 0

    def record(self, index: int, top: tuple[tuple[int, float], ...]) -> None:
        """The likeliest tokens after beam `index`, each with its log-probability."""
        self._results[index] = top

    @property
    def is_complete(self) -> bool:
        """Whether every beam has its continuations."""
        return len(self._results) == len(self.scores)

    def advance(self, outputs: Mapping[int, tuple[int, ...]]) -> list[Continuation]:
        """The continuations that live on, best first; none if the search is over.

        `outputs`: the output of each beam so far.
        """
        ranked = self._ranked()
        self._ranked_results, self._results = self._results, {}
        self._num_steps += 1
        ends = [self._end_of(own.token) for own in ranked]
        living = [own for own, end in zip(ranked, ends, strict=True) if end is None]
        living = living[: self.width]
        is_full = self._params.early_stopping is True and self._is_full
        if self._can_improve and not is_full:
            for own, end in list(zip(ranked, ends, strict=True))[: self.width]:
                if end is not None:
                    self._finish(own, (*outputs[own.parent], own.token), *end)
        if self._is_over(living):
            return []
        return living

    def follow(self, beams: Beams) -> None:
        """The beams of the next step by choice index."""
        self._logprobs = {index: self._logprobs_of(own) for index, own in beams.items()}
        self.scores = {index: own.score for index, own in beams.items()}

    def _logprobs_of(self, own: Continuation) -> tuple[TokenLogprobs, ...]:
        """Of the output with its last token; empty unless they were requested."""
        if self._num_logprobs is None:
            return ()
        top = self._ranked_results[own.parent]
        place = next(i for i, (token, _) in enumerate(top) if token == own.token)
        last = TokenLogprobs(own.token, top[place][1], place + 1, top[: self._num_logprobs])
        return (*self._logprobs[own.parent], last)

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.width

    def _ranked(self) -> list[Continuation]:
        continuations = [
            Continuation(self.scores[index] + logprob, index, token)
            for index, top in sorted(self._results.items())
            for token, logprob in top
        ]
        return sorted(continuations, key=lambda own: -own.score)[: self.num_candidates]

    def _end_of(self, token: int) -> tuple[FinishReason, int | None] | None:
        """The finish reason and the stop token, if the output ends with this token."""
        if token in self._eos:
            return "stop", None
        if token in self._stops:
            return "stop", token
        return ("length", None) if self._num_steps >= self._max_tokens else None

    def _finish(
        self,
        own: Continuation,
        tokens: tuple[int, ...],
        reason: FinishReason,
        stop_reason: int | None,
    ) -> None:
        score = own.score / self._num_steps**self._params.length_penalty
        logprobs = self._logprobs_of(own)
        self.finished.append(FinishedOutput(score, tokens, reason, stop_reason, logprobs))
        self.finished.sort(key=lambda output: -output.score)
        del self.finished[self.width :]

    def _is_over(self, living: list[Continuation]) -> bool:
        if not living:
            return True
        length = self._num_steps
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        best = living[0].score / length**self._params.length_penalty
        self._can_improve = self._can_improve and (
            not self._is_full or best > self.finished[-1].score
        )
        is_stopped = self._params.early_stopping is True and self._is_full
        return not self._can_improve or is_stopped
