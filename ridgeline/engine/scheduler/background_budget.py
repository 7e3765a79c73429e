"""Token budget for background (batch) requests, with and without interactive traffic.

What. A step may carry as many background tokens as leave interactive requests within their SLOs. A
step that feeds r rows takes T(r) seconds, and every sequence in it gets one token (or waits for
one) per step, so T is the time per output token. If a request in the step has a TPOT SLO,
background requests get the rows up to the largest r with T(r) <= `TPOT_SLO_SHARE` of the tightest
one. If none has, they may make a step `SLOWDOWN_WITHOUT_SLO` times as long as it would be without
them.

T is learned from the engine's own steps, from one plan to the next, so it includes everything a
step takes. Nothing is measured at startup, and a machine that becomes slower is noticed. Between
two row counts seen recently, T is interpolated linearly. Beyond the largest it is extrapolated in
proportion, because k steps of r rows do the work of one step of k·r rows. That never
underestimates, so background load grows step by step and interactive requests do not pay for a
surprise. An error at one row count moves the whole curve a little, since the machine may be the
cause (another process, longer contexts).

While no interactive request is served, a step of background tokens is what the next interactive
request has to wait for. If requests with a TTFT SLO arrived recently, such a step takes at most
`TTFT_SLO_SHARE` of the tightest of those SLOs. Otherwise it may be as large as any.

A configured number of background tokens applies to steps shared with interactive requests;
background-only steps then use the whole budget.

Invariant (tests/engine/scheduler/test_background_budget.py): with T increasing in rows, the time
per output token of interactive requests stays within the SLO with background load if it does
without, and background requests make progress.

When it loses. Without chunked prefill, a background prompt is computed in one step however long it
is. An SLO that interactive requests violate by themselves leaves background requests nothing. The
first request with a TTFT SLO arrives unannounced.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple, Protocol

from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.step_builder import StepBuilder
from ridgeline.records import Request

TPOT_SLO_SHARE = 0.8
"""Share of a TPOT SLO that a step may take. The rest is for what steps do not show, such as prompts
being admitted and the way to the client."""
SLOWDOWN_WITHOUT_SLO = 1.25
"""How much longer background tokens may make a step whose requests have no TPOT SLO."""
TTFT_SLO_SHARE = 0.5
"""Share of a TTFT SLO that a background-only step may take. The rest is for the step that computes
the first token."""
_SLO_MEMORY_S = 600.0  # how long after a request with a TTFT SLO more of its kind are expected
_MIN_BACKGROUND_ROWS = 16  # of a background-only step: keeps it going, and T measured, at any SLO

_NEW, _COMMON = 0.3, 0.1  # weight of the latest step: at its row count, at all others
_NOISE = 1 / 16  # steps of one row count differ by this much; it says nothing about the others
_MAX_RATIO = 2.0  # a step slower than predicted by more than this counts as this much slower
_MEMORY = 256  # steps after which an unused point of the curve is dropped


class BackgroundPolicy(Protocol):
    """Decides how many background tokens a step may carry, and observes how long steps take."""

    def max_tokens_mixed(self, num_rows: int, tpot_s: float | None) -> int:
        """Background tokens in a step that feeds `num_rows` interactive rows.

        `tpot_s` is the tightest TPOT SLO among the interactive requests, in seconds.
        """
        ...

    def max_tokens_alone(self, ttft_s: float) -> int | None:
        """Tokens of a background-only step under the tightest TTFT SLO; None is unlimited."""
        ...

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` rows took `seconds` from its plan to the next one."""
        ...

    def describe(self) -> str:
        """The latest decisions and their reasons, in words."""
        ...


class FixedBackgroundTokens:
    """A configured number of background tokens per mixed step."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def max_tokens_mixed(self, num_rows: int, tpot_s: float | None) -> int:
        return self._num_tokens

    def max_tokens_alone(self, ttft_s: float) -> int | None:
        return None

    def observe_step(self, num_rows: int, seconds: float) -> None:
        pass

    def describe(self) -> str:
        return f"{self._num_tokens}: as requested"


class MixedStepLimit(NamedTuple):
    """The background tokens allowed next to `num_rows` interactive rows, and the reason."""

    num_tokens: int
    num_rows: int
    limit_s: float
    tpot_s: float | None

    def __str__(self) -> str:
        total, limit_ms = self.num_rows + self.num_tokens, self.limit_s * 1e3
        why = f"{SLOWDOWN_WITHOUT_SLO:g} times a step without them, as no TPOT SLO applies"
        if self.tpot_s is not None:
            why = f"{TPOT_SLO_SHARE:g} of the TPOT SLO of {self.tpot_s * 1e3:g} ms"
        rows = f"{self.num_tokens} rows next to {self.num_rows} interactive ones"
        return f"{rows}: {total} take at most {limit_ms:.1f} ms, {why}"


class BackgroundStepLimit(NamedTuple):
    """The tokens allowed in a background-only step, and the TTFT SLO behind it."""

    num_tokens: int
    ttft_s: float

    def __str__(self) -> str:
        limit_ms = TTFT_SLO_SHARE * self.ttft_s * 1e3
        why = f"{TTFT_SLO_SHARE:g} of the TTFT SLO of {self.ttft_s * 1e3:g} ms"
        return f"{self.num_tokens} rows on their own: they take at most {limit_ms:.1f} ms, {why}"


class LearnedBackgroundTokens:
    """Derives the background tokens from SLOs and from step times learned while serving."""

    def __init__(self) -> None:
        self._curve = StepTimeByRows()
        self._mixed: MixedStepLimit | None = None
        self._alone: BackgroundStepLimit | None = None

    def max_tokens_mixed(self, num_rows: int, tpot_s: float | None) -> int:
        limit_s = SLOWDOWN_WITHOUT_SLO * self._curve.lower_bound_s(num_rows)
        if tpot_s is not None:
            limit_s = TPOT_SLO_SHARE * tpot_s
        num_tokens = max(0, self._curve.max_rows_within(limit_s) - num_rows)
        self._mixed = MixedStepLimit(num_tokens, num_rows, limit_s, tpot_s)
        return num_tokens

    def max_tokens_alone(self, ttft_s: float) -> int | None:
        num_rows = self._curve.max_rows_within(TTFT_SLO_SHARE * ttft_s)
        num_tokens = max(_MIN_BACKGROUND_ROWS, num_rows)
        self._alone = BackgroundStepLimit(num_tokens, ttft_s)
        return num_tokens

    def observe_step(self, num_rows: int, seconds: float) -> None:
        self._curve.observe(num_rows, seconds)

    def describe(self) -> str:
        limits = [str(limit) for limit in (self._mixed, self._alone) if limit is not None]
        return "derived: " + "; ".join(limits) if limits else "derived from measured step times"


class StepTimeByRows:
    """T(rows) in seconds, at the row counts seen recently (about 16 per octave)."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._at_s: list[float] = []  # T at those rows, divided by `_machine`
        self._last: list[int] = []  # the latest step that updated each
        self._machine, self._num_steps = 1.0, 0

    def lower_bound_s(self, rows: int) -> float:
        """At most the time a step of `rows` rows takes; 0 if only far smaller steps were seen."""
        below = bisect_right(self._rows, rows) - 1
        near = below >= 0 and 2 * self._rows[below] >= rows
        return self._machine * self._at_s[below] if near else 0.0

    def max_rows_within(self, limit_s: float) -> int:
        """The most rows that take at most `limit_s`; beyond the largest seen, in proportion."""
        limit_s /= self._machine
        for i in range(len(self._rows) - 1, -1, -1):
            rows, at_s = self._rows[i], self._at_s[i]
            if at_s <= limit_s:
                if i == len(self._rows) - 1:
                    return int(rows * limit_s / at_s)
                share = (limit_s - at_s) / (self._at_s[i + 1] - at_s)
                return rows + int((self._rows[i + 1] - rows) * share)
        return 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step of `rows` rows."""
        if rows < 1 or not seconds > 0:
            return
        self._num_steps += 1
        if self._num_steps % _MEMORY == 0:
            self._drop_old_points()
        coarse = max(0, rows.bit_length() - 5)
        rows = rows >> coarse << coarse
        i = bisect_left(self._rows, rows)
        if i == len(self._rows) or self._rows[i] != rows:
            self._rows.insert(i, rows)
            self._at_s.insert(i, seconds / self._machine)
            self._last.insert(i, self._num_steps)
            return
        error = min(_MAX_RATIO, seconds / (self._at_s[i] * self._machine)) - 1
        # What exceeds the usual noise is partly put down to the machine, that is, to every point.
        common = _COMMON * (error - max(-_NOISE, min(_NOISE, error)))
        self._machine *= 1 + common
        self._at_s[i] *= (1 + _NEW * error) / (1 + common)
        self._last[i] = self._num_steps

    def _drop_old_points(self) -> None:
        kept = [i for i, last in enumerate(self._last) if self._num_steps - last < _MEMORY]
        self._rows = [self._rows[i] for i in kept]
        self._at_s = [self._at_s[i] for i in kept]
        self._last = [self._last[i] for i in kept]


class BackgroundBudget:
    """Applies a `BackgroundPolicy` to the steps being planned.

    Step times are observed only while background requests exist; nothing else uses them.
    """

    def __init__(self, policy: BackgroundPolicy, registry: SequenceRegistry) -> None:
        self.policy, self._registry = policy, registry
        self._num_rows, self._planned_s = 0, 0.0
        self._ttft_slos: dict[float, float] = {}  # TTFT SLO -> arrival of the latest such request

    def note_slo(self, request: Request) -> None:
        """Remember the TTFT SLO of an interactive request: more of its kind may arrive."""
        if not request.background and request.slo is not None and request.slo.ttft_s is not None:
            self._ttft_slos[request.slo.ttft_s] = request.arrival_s

    def begin_step(self, now_s: float) -> None:
        """Call before a step is planned: learn from the time since the last plan."""
        # Sequences that still run have waited for nothing but the last step.
        if self._num_rows and self._registry.running:
            self.policy.observe_step(self._num_rows, now_s - self._planned_s)
        self._num_rows, self._planned_s = 0, now_s

    def end_plan(self, step: StepBuilder) -> None:
        """Call when the step is complete."""
        lane = self._registry.lanes[-1]
        if lane.num_running or lane.has_waiting:
            self._num_rows = step.num_rows

    def limit_mixed_step(self, step: StepBuilder) -> None:
        """Limit the background tokens of a step whose interactive runs are planned."""
        slos = (
            seq.request.slo.tpot_s
            for seq in self._registry.running
            if seq.request.slo is not None and not seq.request.background
        )
        tpot_s = min((slo for slo in slos if slo is not None), default=None)
        step.budget.limit(self.policy.max_tokens_mixed(step.num_rows, tpot_s))

    def limit_background_step(self, step: StepBuilder) -> None:
        """Limit a step without interactive runs, which the next interactive request waits for."""
        since_s = step.now_s - _SLO_MEMORY_S
        self._ttft_slos = {slo: at_s for slo, at_s in self._ttft_slos.items() if at_s >= since_s}
        if self._ttft_slos:
            num_tokens = self.policy.max_tokens_alone(min(self._ttft_slos))
            if num_tokens is not None:
                step.budget.limit(num_tokens)


def make_background_policy(num_tokens: int | None) -> BackgroundPolicy:
    """A fixed number of tokens per mixed step, or (None) one derived from SLOs and step times."""
    return LearnedBackgroundTokens() if num_tokens is None else FixedBackgroundTokens(num_tokens)
