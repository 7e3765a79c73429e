"""Latencies and counts of one request, and whether it met its SLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from ridgeline.records import Event, Failed, Finished, FinishReason, Slo, Started, Token

_TIMINGS = (
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
    "tokens_per_second",
)  # fmt: skip


class RequestObserver(Protocol):
    """Where a timer's observations go."""

    def now(self) -> float: ...

    def observe(self, name: str, value: float) -> None: ...

    def observe_token(self, publish_s: float, gap_s: float | None) -> None:
        """A token was published `publish_s` after it was sampled, and `gap_s` after the choice's
        last one (None: it is the first)."""
        ...

    def count_output(self, num_tokens: int) -> None: ...

    def count_prompt(self, num_tokens: int) -> None: ...

    def count_cached(self, num_tokens: int) -> None: ...

    def count_cancelled(self, phase: Literal["queued", "running"]) -> None: ...

    def count_finished(self, reason: FinishReason) -> None: ...

    def count_slo(self, slo_class: str, missed: Sequence[str]) -> None: ...


class _ChoiceTimes:
    """When a choice's first and last token were published, and how many there were."""

    __slots__ = ("first_s", "last_s", "num_tokens")

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.num_tokens = 0


class RequestTimer:
    """Turns the events of one engine request into observations, on the observer's clock.

    `score_only`: the token that scoring a prompt costs is not output. `first_s` is when the first
    token was published; `reasons` are those of the choices that have ended.
    """

    def __init__(
        self,
        observer: RequestObserver,
        num_prompt_tokens: int,
        num_choices: int,
        slo_class: str = "",
        slo: Slo | None = None,
        *,
        score_only: bool = False,
    ) -> None:
        self._observer, self._score_only = observer, score_only
        self._slo_class, self._slo = slo_class, slo
        self._missed: dict[str, None] = {}
        self._timings: dict[str, float | None] = dict.fromkeys(_TIMINGS)
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = observer.now()
        self._started_s: float | None = None
        self._has_failed = False
        self.first_s: float | None = None
        self.reasons: list[FinishReason] = []
        self._choices = {index: _ChoiceTimes() for index in range(num_choices)}

    def observe(self, events: Sequence[Event], now_s: float) -> int:
        """Account for the events of a step, published at `now_s`; the number of output tokens."""
        num_tokens = 0
        for event in events:
            if isinstance(event, Token):
                self._observe_token(event, now_s)
                num_tokens += 1
            elif isinstance(event, Finished):
                self._finish(event, now_s)
            elif isinstance(event, Started):
                self._start(event.at_s)
                self._observer.count_cached(event.cached_tokens)
            elif isinstance(event, Failed):
                self._has_failed = True
        if self._score_only or not num_tokens:
            return 0
        self._observer.count_output(num_tokens)
        return num_tokens

    def abort(self) -> None:
        """The client disconnected or the request failed: unfinished choices count as aborted."""
        for _ in self._choices:
            self._observer.count_finished("abort")
            if not self._has_failed:
                phase: Literal["queued", "running"] = (
                    "queued" if self._started_s is None else "running"
                )
                self._observer.count_cancelled(phase)
        self._choices.clear()
        if self._has_failed and self._slo is not None:
            self._observer.count_slo(self._slo_class, ("failed",))

    @property
    def started_s(self) -> float | None:
        """When the engine began with the request."""
        return self._started_s

    def timings(self) -> dict[str, float | None]:
        """vLLM's per-request `metrics`, of the choice that finished last: milliseconds in the
        queue, from there to the first token, and from there to the last; tokens per second without
        the queue."""
        return dict(self._timings)

    def _start(self, at_s: float) -> None:
        if self._started_s is None:
            self._started_s = max(at_s, self._arrival_s)
            self._observer.observe("request_queue_time_seconds", self._started_s - self._arrival_s)
            self._observer.count_prompt(self._num_prompt_tokens)

    def _observe_token(self, event: Token, now_s: float) -> None:
        if self._started_s is None:
            self._start(now_s)
        choice = self._choices[event.index]
        if choice.num_tokens == 0:
            choice.first_s = now_s
            self.first_s = now_s if self.first_s is None else self.first_s
            self._observer.observe("time_to_first_token_seconds", now_s - self._arrival_s)
        gap_s = now_s - choice.last_s if choice.num_tokens else None
        self._observer.observe_token(now_s - event.at_s, gap_s)
        choice.last_s = now_s
        choice.num_tokens += 1

    def _finish(self, event: Finished, now_s: float) -> None:
        choice = self._choices.pop(event.index)
        observer, started_s = self._observer, self._started_s
        self.reasons.append(event.reason)
        observer.count_finished(event.reason)
        observer.observe("e2e_request_latency_seconds", now_s - self._arrival_s)
        num_tokens = 0 if self._score_only else choice.num_tokens
        observer.observe("request_generation_tokens", num_tokens)
        if choice.num_tokens == 0 or started_s is None:
            return
        decode_s = choice.last_s - choice.first_s
        computing_s = choice.last_s - started_s
        observer.observe("request_prefill_time_seconds", choice.first_s - started_s)
        observer.observe("request_decode_time_seconds", decode_s)
        observer.observe("request_inference_time_seconds", computing_s)
        tpot_s = decode_s / (choice.num_tokens - 1) if choice.num_tokens > 1 else None
        # vLLM reports 0 for a choice of one token
        observer.observe("request_time_per_output_token_seconds", tpot_s or 0.0)
        self._timings = {
            "time_to_first_token_ms": (choice.first_s - started_s) * 1000,
            "generation_time_ms": decode_s * 1000,
            "queue_time_ms": (started_s - self._arrival_s) * 1000,
            "mean_itl_ms": None if tpot_s is None else tpot_s * 1000,
            "tokens_per_second": choice.num_tokens / computing_s if computing_s > 0 else None,
        }
        self._judge_slo(choice.first_s - self._arrival_s, tpot_s, now_s - self._arrival_s)

    def _judge_slo(self, ttft_s: float, tpot_s: float | None, e2e_s: float) -> None:
        """A request is judged once, when its last choice ends."""
        if self._slo is None:
            return
        self._missed |= dict.fromkeys(self._slo.misses(ttft_s, tpot_s, e2e_s))
        if not self._choices:
            self._observer.count_slo(self._slo_class, tuple(self._missed))
