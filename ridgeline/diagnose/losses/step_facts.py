"""Facts about steps for the causes: how they compare with each other and with expectations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.losses.latency_losses import LEAST_DECODE_STEPS, Expected
from ridgeline.records import RunTrace, StepStat
from ridgeline.roofline import phase_of
from ridgeline.stats import percentile

SPANS = 10  # equal parts of a run
LEAST_EXCESS = 0.1  # share of a span's step time above the expectation from which the span is slow


def step_facts(run: RunTrace, expected: Expected | None = None) -> dict[str, Value]:
    """Facts derived from the steps; those that cannot be derived are absent."""
    steps = [step for step in run.steps if step.shapes]
    facts: dict[str, Value] = {}
    published = [
        r.token_s[0] - r.first_computed_s
        for r in run.requests
        if r.token_s and r.first_computed_s is not None
    ]
    if published:
        facts["publish_p50_s"] = percentile(published, 50)
    if not steps:
        return facts
    plan_s, gap_s = between(steps)
    facts["plan_p50_s"], facts["gap_p50_s"] = plan_s, gap_s
    facts.update(_phases(steps))
    if expected is not None:
        facts.update(_against(steps, expected))
        if expected.between_s:
            facts["between_over_usual"] = (plan_s + gap_s) / expected.between_s
    return facts


def between(steps: Sequence[StepStat]) -> tuple[float, float]:
    """Median planning time and median gap before it, over steps with running sequences."""
    gaps = [b.at_s - (a.at_s + a.plan_s + a.run_s) for a, b in pairwise(steps)]
    busy = [gap for gap, step in zip(gaps, steps, strict=False) if step.num_running > 0]
    gap_s = max(0.0, percentile(busy, 50)) if busy else 0.0
    return percentile([step.plan_s for step in steps], 50), gap_s


def _phases(steps: Sequence[StepStat]) -> dict[str, Value]:
    decode = [step for step in steps if phase_of(step) == "decode"]
    others = [step.run_s for step in steps if phase_of(step) != "decode"]
    facts: dict[str, Value] = {}
    if others:
        facts["mixed_p95_s"] = percentile(others, 95)
    if len(decode) >= LEAST_DECODE_STEPS:
        facts["decode_step_s"] = percentile([step.run_s for step in decode], 50)
    by_size = _by_size(decode)
    if by_size is not None:
        facts["batch_slope_share"] = min(1.0, max(0.0, 1 - by_size.own_s / by_size.mean_s))
    facts.update(batch_facts(steps))
    return facts


def batch_facts(steps: Sequence[StepStat]) -> dict[str, Value]:
    """Throughput gain from doubling the batch, and mean tokens per step.

    The steps may be recorded or inferred from outside (`infer_steps_from_tokens`).
    """
    steps = [step for step in steps if step.shapes]
    decode = [step for step in steps if phase_of(step) == "decode"]
    lines = (_line([float(step.num_tokens) for step in steps], steps), _by_size(decode))
    own_s = min((line.own_s for line in lines if line is not None), default=None)
    if own_s is None:
        return {}
    own = min(1.0, max(0.0, own_s / statistics.fmean(step.run_s for step in steps)))
    return {
        "doubled_batch_gain": 2 / (2 - own),
        "mean_step_tokens": statistics.fmean(step.num_tokens for step in steps),
    }


class _Line(NamedTuple):
    """A straight line through step times: the fixed cost `own_s` of a step, and the mean `mean_s`.

    Doubling every step only saves fixed cost, which gives 2 / (2 - own_s / mean_s) times the tokens
    per second. Prompt tokens cost less than decoded ones, so that a line through both overestimates
    `own_s`; of several lines, the smallest `own_s` counts.
    """

    own_s: float
    mean_s: float


def _line(sizes: Sequence[float], steps: Sequence[StepStat]) -> _Line | None:
    """Fit by least squares; None if the sizes hardly differ."""
    if len(steps) < LEAST_DECODE_STEPS or max(sizes) - min(sizes) < 2:
        return None
    times = [step.run_s for step in steps]
    return _Line(statistics.linear_regression(sizes, times).intercept, statistics.fmean(times))


def _by_size(decode: Sequence[StepStat]) -> _Line | None:
    return _line([float(len(step.shapes)) for step in decode], decode)


def _against(steps: Sequence[StepStat], expected: Expected) -> dict[str, Value]:
    total = sum(map(expected.seconds, steps))
    return {
        "slow_steps_share": sum(map(expected.is_slow, steps)) / len(steps),
        "step_over_expected": sum(step.run_s for step in steps) / total if total > 0 else 0.0,
        "slow_spans_share": slow_spans(steps, expected),
    }


def slow_spans(steps: Sequence[StepStat], expected: Expected) -> float:
    """Share of the spans of a run in which slow steps cost at least a tenth of the step time.

    Another process that competes for the cores shows in all spans; a single stall only in one.
    """
    began_s, ended_s = steps[0].at_s, max(step.at_s for step in steps)
    length_s = max(ended_s - began_s, 1e-9) / SPANS
    took, excess = [0.0] * SPANS, [0.0] * SPANS
    for step in steps:
        span = min(SPANS - 1, int((step.at_s - began_s) / length_s))
        took[span] += step.run_s
        if expected.is_slow(step):
            excess[span] += step.run_s - expected.seconds(step)
    busy = [over / s for over, s in zip(excess, took, strict=True) if s > 0]
    return sum(over >= LEAST_EXCESS for over in busy) / len(busy) if busy else 0.0


def missed_prefix(
    run: RunTrace, shared_share: float, metrics: Mapping[str, float] | None = None
) -> float:
    """Share of the prompt tokens that repeat an earlier prompt but were computed again.

    `shared_share`: share of the prompt tokens that repeat an earlier prompt. Cache hits are taken
    from the requests, or from the server's `metrics`: `hit_tokens` of `queried_tokens`, or the
    gauge `hit_share`. Zero queried tokens mean that the cache is off, so that all of `shared_share`
    was missed. If the server reports none of these, the result is 0.
    """
    metrics = metrics or {}
    prompt = sum(request.prompt_tokens for request in run.requests)
    cached = sum(request.cached_tokens for request in run.requests)
    if prompt and (cached or run.steps):
        return max(0.0, shared_share - cached / prompt)
    if "queried_tokens" in metrics and "hit_tokens" in metrics:
        queried = metrics["queried_tokens"]
        return max(0.0, shared_share - (metrics["hit_tokens"] / queried if queried else 0.0))
    return max(0.0, shared_share - metrics["hit_share"]) if "hit_share" in metrics else 0.0
