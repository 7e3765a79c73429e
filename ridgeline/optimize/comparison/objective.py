"""The objective as one number per run, where more is better.

  goodput   requests per second that met the SLO
  cost      output tokens per second of requests that met the SLO; inverse to dollars per token
  latency   1 / mean end-to-end latency, at a load that both configurations carry

Goodput at an offered rate is the rate times the share that met the SLO, counted over the offered
window, so the random number of arrivals cancels. A queue left over from a short run would look like
capacity, so a run that took longer to drain than one response takes is stretched by the excess.
Above the knee goodput collapses within a few percent of load; how far says little about where the
knee is. So a run that missed the SLO is credited with what the same configuration delivered at the
largest lower load that it was seen to hold, and with its own load if a larger one was held: that
miss was bad luck, as runs of a few requests have it (`credit_held_loads`). A configuration that
held no load has no credit. The figures shown to the user (`pool_runs`) are the credited scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from ridgeline.measure.goodput_search import is_saturated
from ridgeline.measure.metrics.goodput import goodput, meets
from ridgeline.measure.metrics.latency import (
    distribution,
    e2e_s,
    successful_requests,
    tpot_s,
    ttft_s,
)
from ridgeline.optimize.comparison.early_stop import complete_unfinished
from ridgeline.optimize.environment import Load, arrival_times_s
from ridgeline.optimize.result import ConfigurationFigures, LatencySamples
from ridgeline.records import RequestTrace, RunTrace, Slo
from ridgeline.report.numbers import rounded
from ridgeline.stats import percentile

Objective = Literal["goodput", "latency", "cost"]
MIN_MET = 0.5  # keeps the logarithm finite if no request met the SLO
MAX_LOSS = 0.18  # share of requests: a run that missed more is far above the knee, and ends


class JudgedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its score.

    `resolution`: the smallest relative difference that it can show.
    """

    rate: float
    holds: bool
    score: float
    resolution: float
    num_met: int
    trace: RunTrace

    @property
    def is_busy(self) -> bool:
        """Whether other work took so much of the CPU that the run says nothing."""
        return self.trace.machine_load is not None and self.trace.machine_load.is_busy

    @property
    def busy_share(self) -> float:
        """Share of the CPU that other work took; 0 if unknown."""
        return 0.0 if self.trace.machine_load is None else self.trace.machine_load.taken_share


def judge_run(run: RunTrace, load: Load, slo: Slo, objective: Objective) -> JudgedRun:
    """Score a run that was offered this load."""
    run = run if objective == "latency" else complete_unfinished(run)
    judged = goodput(run, slo)
    return JudgedRun(
        rate=load.rate,
        holds=judged.holds and not is_saturated(run),
        score=_score(run, load, slo, objective, stretched=judged.holds),
        resolution=0.5 / max(1, judged.num_requests),
        num_met=judged.num_met,
        trace=run,
    )


def credit_held_loads(
    runs: Sequence[JudgedRun], others: Sequence[JudgedRun] = ()
) -> tuple[JudgedRun, ...]:
    """The runs of one configuration; those that missed the SLO scored by the best load that the
    held ones support: a lower one that was held, or their own below one that was held.

    `others`: further runs of the same configuration whose loads count.
    """
    held = [judged for judged in (*runs, *others) if judged.holds]
    return tuple(judged if judged.holds else _credit(judged, held) for judged in runs)


def _credit(missed: JudgedRun, held: Sequence[JudgedRun]) -> JudgedRun:
    """The run that missed the SLO with the largest score that the held loads support."""
    supported = [min(h.score, missed.rate) if h.rate > missed.rate else h.score for h in held]
    return msgspec.structs.replace(missed, score=max([missed.score, *supported]))


class StopWhenLost:
    """Ends a run once `MAX_LOSS` of its requests missed the SLO.

    It shortens the longest runs, those far above the knee, whose own score hardly counts.
    """

    def __init__(self, load: Load, slo: Slo) -> None:
        self._slo, self._missed = slo, 0
        self._allowed = MAX_LOSS * len(arrival_times_s(load))

    def __call__(self, request: RequestTrace) -> str | None:
        self._missed += not meets(request, self._slo)
        return (
            "too many requests missed the SLO to affect the score"
            if self._missed > self._allowed
            else None
        )


def _score(run: RunTrace, load: Load, slo: Slo, objective: Objective, *, stretched: bool) -> float:
    """The score of a run. `stretched`: count the time that it took to drain.

    Where the SLO was missed the queue shows in the requests already, and the run may have been
    ended early.
    """
    if objective == "latency":
        return 1 / _mean_e2e_s(run)
    good = [request for request in run.requests if meets(request, slo)]
    delivered = float(len(good))
    if objective == "cost":
        delivered = float(sum(request.output_tokens for request in good))
    per_request = max(delivered, MIN_MET) / max(1, len(run.requests))
    return load.rate * per_request / (_stretch(run, load.window_s) if stretched else 1.0)


def _stretch(run: RunTrace, window_s: float) -> float:
    """How much longer than the window the run took, beyond one typical response; at least 1.

    Typical is the median of the first third of responses, which met the shortest queue.
    """
    done = sorted(successful_requests(run.requests), key=lambda request: request.scheduled_s)
    early = [e2e_s(request) or 0.0 for request in done[: max(1, len(done) // 3)]]
    if not early:
        return 1.0
    last_s = max(request.token_s[-1] for request in done if request.token_s)
    return max(1.0, (last_s - percentile(early, 50)) / window_s)


def _mean_e2e_s(run: RunTrace) -> float:
    """A request that failed counts as lasting the whole run: failing is not fast."""
    waited = [
        end if (end := e2e_s(request)) is not None and request.error is None else run.duration_s
        for request in run.requests
    ]
    return math.fsum(waited) / len(waited) if waited else run.duration_s or 1.0


def runs_within_slo(runs: Sequence[JudgedRun]) -> Sequence[JudgedRun]:
    """The runs that met the SLO, or all if none did: a staircase probes beyond the knee too."""
    return [judged for judged in runs if judged.holds] or runs


def pool_runs(runs: Sequence[JudgedRun], slo: Slo, objective: Objective) -> ConfigurationFigures:
    """Runs of one configuration as one record.

    The objective is the mean of the runs' scores, the other rates are in proportion to it, and
    latencies are percentiles over the requests of the runs that met the SLO.
    """
    scores = [judged.score for judged in runs]
    runs = runs_within_slo(runs)
    requests = [request for judged in runs for request in judged.trace.requests]
    done = [request for request in requests if request.error is None and request.token_s]
    good = [request for request in requests if meets(request, slo)]
    num_requests = max(1, len(requests))
    rate = _geometric([judged.rate for judged in runs])
    window_s = num_requests / rate
    score = _geometric(scores)
    delivered = {
        "goodput": rate * len(good) / num_requests,
        "cost": sum(request.output_tokens for request in good) / window_s,
        "latency": score,
    }
    scale = score / delivered[objective] if delivered[objective] else 1.0
    if objective == "latency":
        scale = 1.0
    return ConfigurationFigures(
        load=f"{rounded(rate)} req/s",
        score=score,
        goodput_req_s=scale * delivered["goodput"],
        good_output_tok_s=scale * delivered["cost"],
        good_input_tok_s=scale * sum(request.prompt_tokens for request in good) / window_s,
        output_tok_s=sum(request.output_tokens for request in done) / window_s,
        attainment_share=len(good) / num_requests,
        failed_share=sum(1 for request in requests if request.error is not None) / num_requests,
        num_requests=len(requests),
        num_runs=len(runs),
        preemptions=sum(s.num_preempted for judged in runs for s in judged.trace.steps),
        spread=_spread(scores),
        **_latencies(done),
    )


def _latencies(done: Sequence[RequestTrace]) -> dict[str, float | None]:
    latencies: dict[str, float | None] = {}
    for name, of in (("ttft", ttft_s), ("tpot", tpot_s), ("e2e", e2e_s)):
        values = distribution(of(request) for request in done)
        for q in (50, 95):
            latencies[f"{name}_p{q}_s"] = values.p(q) if values else None
    return latencies


def latency_samples(runs: Sequence[JudgedRun]) -> LatencySamples:
    """Every request's TTFT and TPOT, for the figures."""
    done = [r for judged in runs for r in judged.trace.requests if r.token_s]
    return LatencySamples(
        ttft_s=tuple(value for value in map(ttft_s, done) if value is not None),
        tpot_s=tuple(value for value in map(tpot_s, done) if value is not None),
    )


def _geometric(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def _spread(values: Sequence[float]) -> float | None:
    """Relative standard deviation from run to run."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance) / mean
