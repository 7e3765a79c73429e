"""One request's events as observations: latencies, counts, and whether its promise was kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ridgeline.records import Event, Failed, Finished, Slo, Started, Token

if TYPE_CHECKING:
    from ridgeline.serve.http.native_writer import Carried
    from ridgeline.serve.metrics.registry import Metrics


_TIMINGS = (
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
    "tokens_per_second",
)  # fmt: skip


class _Choice:
    """What the meter remembers of one choice: when its first and last token came, and how many."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.num_tokens = 0


class Meter:
    """Turns the events of one request into observations. Instants are on the server's own clock."""

    def __init__(
        self,
        metrics: Metrics,
        num_prompt_tokens: int,
        num_choices: int,
        slo_class: str = "",
        slo: Slo | None = None,
        *,
        scores_only: bool = False,
    ) -> None:
        self._metrics = metrics
        self._scores_only = scores_only  # the token that scoring costs is nobody's answer
        self._slo_class, self._slo = slo_class, slo
        self._missed: dict[str, None] = {}
        self._timings: dict[str, float | None] = dict.fromkeys(_TIMINGS)
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = metrics.now()
        self._started_s: float | None = None
        self._failed = False
        self._choices = {index: _Choice() for index in range(num_choices)}

    def saw(self, events: Sequence[Event], now: float) -> int:
        """Account for what a step said, on its way to the client at `now`; the answer's tokens."""
        num_tokens = 0
        for event in events:
            if isinstance(event, Token):
                num_tokens += self.saw_token(event, now)
            elif isinstance(event, Finished):
                self._finish(event, now)
            elif isinstance(event, Started):
                self._start(event.at_s)
                self._metrics.count_cached(event.cached_tokens)
            elif isinstance(event, Failed):
                self._failed = True
        return num_tokens

    def saw_token(self, event: Token, now: float) -> int:
        """As `saw`, of one token that came alone."""
        metrics = self._metrics
        metrics.publish.observe(now - event.at_s)
        self._token(event, now)
        if self._scores_only:
            return 0
        metrics.num_tokens += 1
        return 1

    def saw_carried(self, carried: Carried) -> None:
        """Tokens of the only choice that a courier has sent, all so far; it has counted them and
        the gaps between them itself."""
        choice = self._choices.get(0)
        if choice is None or not carried.num_tokens:
            return
        if self._started_s is None:
            self._start(carried.first_s)
        if choice.num_tokens == 0:
            choice.first_s = carried.first_s
            ttft_s = carried.first_s - self._arrival_s
            self._metrics.observe("time_to_first_token_seconds", ttft_s)
        choice.num_tokens, choice.last_s = carried.num_tokens, carried.last_s

    def left(self) -> None:
        """The client went away or the request failed: the open choices count as aborted."""
        for _ in self._choices:
            self._metrics.count_end("abort")
            if not self._failed:
                self._metrics.count_cancelled("queued" if self._started_s is None else "running")
        self._choices.clear()
        if self._failed and self._slo is not None:
            self._metrics.count_promise(self._slo_class, ("failed",))

    def timings(self) -> dict[str, float | None]:
        """vLLM's per-request `metrics`, of the choice that ended last: milliseconds from its first
        share of a step to its first token, from there to its last one, and before them in the
        queue; tokens/s over both but the queue.
        """
        return dict(self._timings)

    def _start(self, at_s: float) -> None:
        """The request got its first share of a step at `at_s`; it is told with that step's outcome."""
        if self._started_s is None:
            self._started_s = max(at_s, self._arrival_s)
            waited_s = self._started_s - self._arrival_s
            self._metrics.observe("request_queue_time_seconds", waited_s)
            self._metrics.count_prompt(self._num_prompt_tokens)

    def _token(self, event: Token, now: float) -> None:
        if self._started_s is None:
            self._start(now)
        choice = self._choices[event.index]
        if choice.num_tokens == 0:
            choice.first_s = now
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival_s)
        else:
            self._metrics.gaps.observe(now - choice.last_s)
        choice.last_s = now
        choice.num_tokens += 1

    def _finish(self, event: Finished, now: float) -> None:
        choice = self._choices.pop(event.index)
        metrics, started_s = self._metrics, self._started_s
        metrics.count_end(event.reason)
        metrics.observe("e2e_request_latency_seconds", now - self._arrival_s)
        num_tokens = 0 if self._scores_only else choice.num_tokens
        metrics.observe("request_generation_tokens", num_tokens)
        if choice.num_tokens == 0 or started_s is None:
            return
        decode_s = choice.last_s - choice.first_s
        metrics.observe("request_prefill_time_seconds", choice.first_s - started_s)
        metrics.observe("request_decode_time_seconds", decode_s)
        metrics.observe("request_inference_time_seconds", choice.last_s - started_s)
        tpot_s = decode_s / (choice.num_tokens - 1) if choice.num_tokens > 1 else None
        metrics.observe("request_time_per_output_token_seconds", tpot_s or 0.0)  # 0, as vLLM's
        self._note(choice, started_s, tpot_s)
        self._judge(choice.first_s - self._arrival_s, tpot_s, now - self._arrival_s)

    def _note(self, choice: _Choice, started_s: float, tpot_s: float | None) -> None:
        computing_s = choice.last_s - started_s
        rate = choice.num_tokens / computing_s if computing_s > 0 else None
        values = (
            (choice.first_s - started_s) * 1000,
            (choice.last_s - choice.first_s) * 1000,
            (started_s - self._arrival_s) * 1000,
            None if tpot_s is None else tpot_s * 1000,
            rate,
        )
        self._timings = dict(zip(_TIMINGS, values, strict=True))

    def _judge(self, ttft_s: float, tpot_s: float | None, e2e_s: float) -> None:
        """Was the promise kept? A request is judged once, when its last choice ends."""
        if self._slo is None:
            return
        self._missed |= dict.fromkeys(self._slo.misses(ttft_s, tpot_s, e2e_s))
        if not self._choices:
            self._metrics.count_promise(self._slo_class, tuple(self._missed))
