"""How many tokens of batch lines a step may carry, beside people and while nobody is there.

What: the most with which people keep what they were promised. A step that feeds r rows takes T(r)
seconds, and everybody who runs in it gets a token (or waits for one) that long: T is the time per
output token. So where people in the step were promised a time per output token, lines get the rows
up to the largest r with T(r) <= `TPOT_SLO_SHARE` of the tightest promise. Where nobody was promised
anything, lines may make a step `SLOWDOWN_WITHOUT_SLO` times as long as it would be for people alone.

T is learnt from the engine's own steps, from one plan to the next, so that all a step takes is in
it: nothing is measured at the start, and a machine that slows down is noticed. Between two numbers
of rows that were seen lately it is straight. Beyond the largest it is taken in proportion, since k
steps of r rows compute what one of k·r rows does: never too low, so that lines feel their way up
and people pay for no surprise. What is off in one place moves the whole curve a little, for it may
be the machine (another process, longer contexts).

While nobody is served, a step of lines is what the next person who comes has to wait for. Where
people were lately promised a first token, such a step takes at most `TTFT_SLO_SHARE` of the tightest of
those promises; else it may be as large as any.

Asked for by number, the share of lines beside people is that number, and alone they take all.

Invariant (tests/engine/scheduler/test_filling.py): with T that grows by rows, people's time per output
token stays within their promise with lines beside them if it does without, and lines go on.

When it loses: where whole prompts are computed in one step (no chunks), a line's prompt is one too,
however long. A promise that people's own steps break leaves lines nothing. The first person who is
promised a first token has not been waited for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple, Protocol

from ridgeline.engine.scheduler.queue.sequence_registry import SequenceRegistry
from ridgeline.engine.scheduler.step_builder import StepBuilder
from ridgeline.records import Request

TPOT_SLO_SHARE = 0.8
"""Of a promised time per output token: the rest is for what steps do not show, such as prompts
that join, and the way to the client."""
SLOWDOWN_WITHOUT_SLO = 1.25
"""Times what a step takes for people alone, where nobody was promised anything."""

TTFT_SLO_SHARE = 0.5
"""Of a promised time to first token: the rest is for the step that computes it, and its prompt."""
_REMEMBERED_S = 600.0
"""How long after the last request of a promise others like it are expected."""
_FEWEST = 16  # rows of a step of lines alone, however tight a promise: they go on, and tell T

_NEW, _COMMON = 0.3, 0.1  # weights of the latest step: for its like, for all others
_ALIKE = 1 / 16  # steps of one kind differ so much by their rows alone: that says nothing of others
_MOST_RATIO = 2.0  # a step that was slower than predicted says no more than this
_LATELY = 256  # steps


class BackgroundPolicy(Protocol):
    """Decides what lines get; hears what steps took."""

    def most(self, num_rows: int, tpot_s: float | None) -> int:
        """Tokens for lines in a step that feeds `num_rows` rows for people; `tpot_s`: their
        tightest promise."""
        ...

    def alone(self, ttft_s: float) -> int | None:
        """Tokens for a step of lines alone, where people are promised a first token; None: all."""
        ...

    def took(self, num_rows: int, seconds: float) -> None:
        """From the plan of a step of so many rows to the next one."""
        ...

    def told(self) -> str:
        """What it decided last, and why."""
        ...


class FixedBackgroundTokens:
    """The number that was asked for."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def most(self, num_rows: int, tpot_s: float | None) -> int:
        return self._num_tokens

    def alone(self, ttft_s: float) -> int | None:
        return None

    def took(self, num_rows: int, seconds: float) -> None:
        pass

    def told(self) -> str:
        return f"{self._num_tokens}: asked for"


class Decided(NamedTuple):
    """What a step of `num_rows` rows for people left to lines, by which limit."""

    num_tokens: int
    num_rows: int
    limit_s: float
    tpot_s: float | None

    def __str__(self) -> str:
        total, limit_ms = self.num_rows + self.num_tokens, self.limit_s * 1e3
        why = f"{SLOWDOWN_WITHOUT_SLO:g} times that of people alone, who were promised nothing"
        if self.tpot_s is not None:
            why = f"{TPOT_SLO_SHARE:g} of the {self.tpot_s * 1e3:g} ms promised per output token"
        found = f"{self.num_tokens} rows beside people's {self.num_rows}"
        return f"{found}: {total} take at most {limit_ms:.1f} ms, {why}"


class Alone(NamedTuple):
    """How large a step of lines was while nobody was served, by whose promise."""

    num_tokens: int
    ttft_s: float

    def __str__(self) -> str:
        limit_ms = TTFT_SLO_SHARE * self.ttft_s * 1e3
        why = f"{TTFT_SLO_SHARE:g} of the {self.ttft_s * 1e3:g} ms promised until a first token"
        return f"alone {self.num_tokens} rows: they take at most {limit_ms:.1f} ms, {why}"


class LearnedBackgroundTokens:
    """See the head of this file."""

    def __init__(self) -> None:
        self._curve = StepTimeByRows()
        self._last: Decided | None = None
        self._alone: Alone | None = None

    def most(self, num_rows: int, tpot_s: float | None) -> int:
        limit_s = SLOWDOWN_WITHOUT_SLO * self._curve.at_least(num_rows)
        if tpot_s is not None:
            limit_s = TPOT_SLO_SHARE * tpot_s
        num_tokens = max(0, self._curve.rows_within(limit_s) - num_rows)
        self._last = Decided(num_tokens, num_rows, limit_s, tpot_s)
        return num_tokens

    def alone(self, ttft_s: float) -> int | None:
        num_tokens = max(_FEWEST, self._curve.rows_within(TTFT_SLO_SHARE * ttft_s))
        self._alone = Alone(num_tokens, ttft_s)
        return num_tokens

    def took(self, num_rows: int, seconds: float) -> None:
        self._curve.observe(num_rows, seconds)

    def told(self) -> str:
        decided = [str(each) for each in (self._last, self._alone) if each is not None]
        return "derived: " + "; ".join(decided) if decided else "derived from what steps take"


class StepTimeByRows:
    """T(rows) in seconds, at the numbers of rows that were seen lately (about 16 to an octave)."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # rising
        self._at: list[float] = []  # what they take, times `_machine`
        self._last: list[int] = []  # the latest step that told of each
        self._machine, self._num_steps = 1.0, 0

    def at_least(self, rows: int) -> float:
        """What a step of so many rows takes, or less; 0 where only far smaller ones were seen."""
        below = bisect_right(self._rows, rows) - 1
        near = below >= 0 and 2 * self._rows[below] >= rows
        return self._machine * self._at[below] if near else 0.0

    def rows_within(self, limit_s: float) -> int:
        """The most rows that take no longer, as far as was seen; else in proportion."""
        limit_s /= self._machine
        for i in range(len(self._rows) - 1, -1, -1):
            rows, at_s = self._rows[i], self._at[i]
            if at_s <= limit_s:
                if i == len(self._rows) - 1:
                    return int(rows * limit_s / at_s)
                share = (limit_s - at_s) / (self._at[i + 1] - at_s)
                return rows + int((self._rows[i + 1] - rows) * share)
        return 0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        if rows < 1 or not seconds > 0:
            return
        self._num_steps += 1
        if self._num_steps % _LATELY == 0:
            self._forget()
        coarse = max(0, rows.bit_length() - 5)
        rows = rows >> coarse << coarse
        i = bisect_left(self._rows, rows)
        if i == len(self._rows) or self._rows[i] != rows:
            self._rows.insert(i, rows)
            self._at.insert(i, seconds / self._machine)
            self._last.insert(i, self._num_steps)
            return
        off = min(_MOST_RATIO, seconds / (self._at[i] * self._machine)) - 1
        common = _COMMON * (off - max(-_ALIKE, min(_ALIKE, off)))
        self._machine *= 1 + common
        self._at[i] *= (1 + _NEW * off) / (1 + common)
        self._last[i] = self._num_steps

    def _forget(self) -> None:
        """What no step has told of for a while: the machine may be another by now."""
        kept = [i for i, last in enumerate(self._last) if self._num_steps - last < _LATELY]
        self._rows = [self._rows[i] for i in kept]
        self._at = [self._at[i] for i in kept]
        self._last = [self._last[i] for i in kept]


class BackgroundBudget:
    """The scheduler's side: what a step of the worse lane gets, and what steps took.

    Steps are watched only while somebody is in the background: nobody else asks.
    """

    def __init__(self, policy: BackgroundPolicy, registry: SequenceRegistry) -> None:
        self.policy, self._registry = policy, registry
        self._num_rows, self._planned_s = 0, 0.0
        self._ttft_s: dict[float, float] = {}  # promises of a first token, and when one last came

    def add(self, request: Request) -> None:
        """Somebody asks; others may be promised the same."""
        if not request.background and request.slo is not None and request.slo.ttft_s is not None:
            self._ttft_s[request.slo.ttft_s] = request.arrival_s

    def begin(self, now_s: float) -> None:
        """Before a step is planned. Whoever still runs has waited for nothing but the last one."""
        if self._num_rows and self._registry.running:
            self.policy.took(self._num_rows, now_s - self._planned_s)
        self._num_rows, self._planned_s = 0, now_s

    def planned(self, step: StepBuilder) -> None:
        """The step is as it will be run."""
        lane = self._registry.lanes[-1]
        if lane.num_running or lane.has_waiting:
            self._num_rows = _num_rows(step)

    def narrow(self, step: StepBuilder) -> None:
        """What is planned from here on serves nobody who waits."""
        promised = (
            seq.request.slo.tpot_s
            for seq in self._registry.running
            if seq.request.slo is not None and not seq.request.background
        )
        tpot_s = min((each for each in promised if each is not None), default=None)
        step.budget.narrow(self.policy.most(_num_rows(step), tpot_s))

    def alone(self, step: StepBuilder) -> None:
        """What is planned from here on is all that the step does; whoever comes waits for it."""
        since_s = step.now_s - _REMEMBERED_S
        self._ttft_s = {each: at_s for each, at_s in self._ttft_s.items() if at_s >= since_s}
        if self._ttft_s:
            num_tokens = self.policy.alone(min(self._ttft_s))
            if num_tokens is not None:
                step.budget.narrow(num_tokens)


def _num_rows(step: StepBuilder) -> int:
    return sum([len(run.tokens) for run in step.runs])


def make_background_policy(num_tokens: int | None) -> BackgroundPolicy:
    """As asked for, or derived."""
    return LearnedBackgroundTokens() if num_tokens is None else FixedBackgroundTokens(num_tokens)
