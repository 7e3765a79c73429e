"""Where the latency of requests went: every second of every request, attributed to a loss.

The life of a request from its scheduled arrival to its last token is matched with the engine's
steps:

    scheduled ─ client_send ─▶ sent ─ wait ─▶ started ─ prefill ─▶ first token ─ decode ─▶ last
                                       │                              │
        by the state of the scheduler: slots · kv · policy ·        by the step that carried it:
        backlog; if there was no queue: front (tokenizer, …)     host · interference · slow · decode

A loss is an upper bound of the gain from fixing its cause, because other causes may then surface;
findings therefore say "up to". Its interval is a bootstrap over requests, as if the same load had
been drawn again.

This needs step records. A server without them is diagnosed from its own metrics
(`ridgeline.diagnose.losses.server_losses`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.roofline import phase_of
from ridgeline.stats import Interval, percentile, ratio_of_sums_interval

LOSSES = (
    "client_send",
    "client_read",
    "front",
    "slots",
    "kv",
    "policy",
    "backlog",
    "host",
    "interference",
    "slow",
    "prefix_miss",
    "prefill",
    "decode",
)
NUM_DRAWS = 200
LEAST_DECODE_STEPS = 8
STALLED_STEPS = 4  # between two tokens of one request; clock jitter can turn two steps into three
EXPECTED_NOISE = 1.15  # a step that takes up to this multiple of its expectation is not slow


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of a healthy machine.

    `seconds`: expected duration of a step; one that takes more than `noise` times as long is slow.
    `between_s`: from the end of one step to the execution of the next, if known.
    """

    seconds: Callable[[StepStat], float]
    noise: float = EXPECTED_NOISE
    between_s: float | None = None

    def is_slow(self, step: StepStat) -> bool:
        return step.run_s > self.noise * self.seconds(step)


class LatencyLosses(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the total latency by loss.

    `shares` sum to about one; the rest is time spent waiting for the step in progress to end.
    `total_s`: latency of all requests together.
    """

    shares: dict[str, Interval]
    num_requests: int
    total_s: float


def attribute_latency(
    run: RunTrace,
    *,
    missed_prefix: float = 0.0,
    expected: Expected | None = None,
    token_budget: int | None = None,
) -> LatencyLosses | None:
    """Attribute the latency of a run with step records to losses.

    `missed_prefix`: share of the prompt tokens that repeat an earlier prompt and were computed
    again. `expected`: step times of a healthy run on this machine. `token_budget`: tokens per step.
    Returns None if the run has no steps, or no request with tokens.
    """
    done = [r for r in run.requests if r.error is None and r.token_s and r.started_s is not None]
    steps = sorted((step for step in run.steps if step.shapes), key=lambda step: step.at_s)
    if not done or not steps:
        return None
    slow = [_slow_s(step, expected) for step in steps]
    timeline = _Timeline(run, steps, slow, token_budget)
    rows = [_of_request(request, timeline, missed_prefix) for request in done]
    totals = [max(r.token_s[-1] - r.scheduled_s, 1e-9) for r in done]
    return LatencyLosses(
        shares=shares_of(rows, totals), num_requests=len(done), total_s=sum(totals)
    )


class _Timeline:
    """The steps of a run in order, indexed by time."""

    def __init__(
        self,
        run: RunTrace,
        steps: Sequence[StepStat],
        slow: Sequence[float],
        token_budget: int | None,
    ) -> None:
        self.steps = steps
        self.begins = [step.at_s for step in self.steps]
        ends = [step.at_s + step.plan_s + step.run_s for step in self.steps]
        later = [*self.begins[1:], ends[-1]]
        self.gaps = [max(0.0, after - end) for after, end in zip(later, ends, strict=True)]
        self.slow = slow
        self.decode_s = decode_step(self.steps)
        self.preempts = any(step.num_preempted for step in self.steps)
        self.phases = [phase_of(step) for step in self.steps]
        self._block_tokens = run.info.block_size if run.info is not None else 16
        prompts = [r.prompt_tokens for r in run.requests if r.prompt_tokens]
        self._need = (sum(prompts) / len(prompts) if prompts else 0.0) / self._block_tokens
        self._budget = token_budget

    def between(self, begin_s: float, end_s: float) -> range:
        """Indices of the steps that overlap an interval."""
        first = max(0, bisect_right(self.begins, begin_s) - 1)
        return range(first, bisect_left(self.begins, end_s))

    def overlap_s(self, i: int, begin_s: float, end_s: float) -> float:
        """How much of an interval lies between the start of step `i` and that of the next one."""
        step = self.steps[i]
        end_of_step = step.at_s + step.plan_s + step.run_s + self.gaps[i]
        return max(0.0, min(end_s, end_of_step) - max(begin_s, step.at_s))

    def reason(self, step: StepStat) -> str:
        """The loss that requests waiting during this step are attributed to."""
        if step.num_running >= step.max_num_seqs:
            return "slots"
        free = step.num_blocks - step.used_blocks
        if step.num_preempted or free < self._need + step.num_running + 1:
            return "kv"
        if self._budget is not None and step.num_tokens >= 0.9 * self._budget:
            return "backlog"
        return "policy"


def _slow_s(step: StepStat, expected: Expected | None) -> float:
    if expected is None or not expected.is_slow(step):
        return 0.0
    return step.run_s - expected.seconds(step)


def decode_step(steps: Sequence[StepStat]) -> Callable[[int], float]:
    """Step time of a pure decode step as a function of its number of sequences.

    A straight line through the decode steps of the run if their sizes differ, else their median; if
    there are too few of them, the first quartile of all steps.
    """
    pure = [step for step in steps if phase_of(step) == "decode"]
    if len(pure) < LEAST_DECODE_STEPS:
        quick_s = percentile([step.run_s for step in steps], 25)
        return lambda num_runs: quick_s
    sizes = [float(len(step.shapes)) for step in pure]
    times = [step.run_s for step in pure]
    if max(sizes) - min(sizes) < 2:
        median_s = percentile(times, 50)
        return lambda num_runs: median_s
    slope, base_s = statistics.linear_regression(sizes, times)
    return lambda num_runs: base_s + max(0.0, slope) * num_runs


def _of_request(request: RequestTrace, line: _Timeline, missed_prefix: float) -> dict[str, float]:
    lost = dict.fromkeys(LOSSES, 0.0)
    computed_s = request.first_computed_s or request.token_s[0]
    lag_s = max(0.0, request.token_s[0] - computed_s)
    lost["client_send"] = request.sent_s - request.scheduled_s
    lost["client_read"] = lag_s
    _waiting(request, line, lost)
    _prefill(request.started_s or 0.0, computed_s, line, lost)
    _decode(request, lag_s, line, lost)
    for loss in (
        "prefill",
        "interference",
    ):  # both are prompts being computed, its own or another's
        lost["prefix_miss"] += missed_prefix * lost[loss]
        lost[loss] *= 1 - missed_prefix
    return lost


def _waiting(request: RequestTrace, line: _Timeline, lost: dict[str, float]) -> None:
    begin_s, end_s = request.sent_s, request.started_s or request.sent_s
    queued_s = longest_s = 0.0
    for i in line.between(begin_s, end_s):
        step, over_s = line.steps[i], line.overlap_s(i, begin_s, end_s)
        longest_s = max(longest_s, over_s)
        if step.num_waiting or step.num_preempted:
            lost[line.reason(step)] += over_s
            queued_s += over_s
    lost["front"] = max(0.0, end_s - begin_s - queued_s - longest_s)


def _prefill(begin_s: float, end_s: float, line: _Timeline, lost: dict[str, float]) -> None:
    for i in line.between(begin_s, end_s):
        _split(line, i, line.overlap_s(i, begin_s, end_s), lost, "prefill")


def _decode(request: RequestTrace, lag_s: float, line: _Timeline, lost: dict[str, float]) -> None:
    instants = [at_s - lag_s for at_s in request.token_s]
    for begin_s, end_s in pairwise(instants):
        inside = line.between(begin_s, end_s)
        if line.preempts and len(inside) >= STALLED_STEPS:
            lost["kv"] += end_s - begin_s  # preempted: several steps ran without this request
            continue
        for i in inside:
            _attribute_decode(i, line.overlap_s(i, begin_s, end_s), line, lost)


def _attribute_decode(i: int, over_s: float, line: _Timeline, lost: dict[str, float]) -> None:
    """Attribute the part of step `i` that a decoding request spent in it."""
    extra_s = 0.0
    if line.phases[i] != "decode":  # what the prompts of other requests added to the step
        step = line.steps[i]
        decode_s = line.decode_s(len(step.shapes)) + line.slow[i]
        extra_s = min(over_s, max(0.0, step.run_s - decode_s))
    lost["interference"] += extra_s
    _split(line, i, over_s - extra_s, lost, "decode")


def _split(line: _Timeline, i: int, over_s: float, lost: dict[str, float], useful: str) -> None:
    """Divide a part of a step's span into host time, unexpected time and useful time."""
    step = line.steps[i]
    span_s = step.plan_s + step.run_s + line.gaps[i]
    part = over_s / span_s if span_s > 0 else 0.0
    host_s, slow_s = part * (step.plan_s + line.gaps[i]), part * line.slow[i]
    lost["host"] += host_s
    lost["slow"] += slow_s
    lost[useful] += max(0.0, over_s - host_s - slow_s)


def shares_of(rows: Sequence[dict[str, float]], totals: Sequence[float]) -> dict[str, Interval]:
    """Share of the total latency per loss, with a bootstrap interval over requests."""
    return {loss: ratio_of_sums_interval([row[loss] for row in rows], totals) for loss in LOSSES}
