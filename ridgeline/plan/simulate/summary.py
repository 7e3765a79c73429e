"""What a simulated fleet gave, as numbers: latencies, goodput, use, bill. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ridgeline.plan.simulate.fleet import FleetOutcome, RequestOutcome
from ridgeline.records import RequestTrace, Slo

PERCENTILES = (50, 90, 95, 99)


class LatencySpread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds over the requests that were served."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of batches, to whom nothing was promised. `took`: to a line's end from when it came, or
    from when its window opened."""

    num_lines: int
    num_served: int
    took: LatencySpread | None


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and rates are of everybody; latencies, from the arrival, and the promise of those who
    are no lines of a batch. `attainment`: share of them that kept the promise, lost ones included;
    `goodput_req_s` theirs per second. `utilisation`: share of the replicas' time in which a step
    was under way. `device_hours` are those paid for.
    """

    num_requests: int
    num_served: int
    duration_s: float
    request_rate: float
    output_tok_s: float
    ttft: LatencySpread | None
    tpot: LatencySpread | None
    e2e: LatencySpread | None
    queue: LatencySpread | None
    attainment: float | None
    goodput_req_s: float | None
    hit_share: float
    num_restarts: int
    num_preempted: int
    mean_in_flight: float
    utilisation: float
    device_hours: float
    most_replicas: int
    num_steps: int
    batch: BatchSummary | None = None


def summarise(outcome: FleetOutcome, slo: Slo | None) -> FleetSummary:
    """The numbers of a run."""
    served = [life for life in outcome.lives if life.finished_s == life.finished_s]
    duration_s = max(outcome.duration_s, 1e-9)
    tokens = sum(life.request.num_output for life in served)
    prompts = sum(life.request.num_prompt for life in served)
    online = [life for life in outcome.lives if not life.request.background]
    waited = [life for life in served if not life.request.background]
    kept = None if slo is None else sum(meets_slo(life, slo) for life in waited)
    paid_s = [min(m.until_s, outcome.duration_s) - m.from_s for m in outcome.members]
    return FleetSummary(
        num_requests=len(outcome.lives),
        num_served=len(served),
        duration_s=outcome.duration_s,
        request_rate=len(served) / duration_s,
        output_tok_s=tokens / duration_s,
        ttft=_spread(waited, lambda x: x.first_s - x.request.at_s),
        tpot=_spread([x for x in waited if x.request.num_output > 1], tpot_of),
        e2e=_spread(waited, lambda x: x.finished_s - x.request.at_s),
        queue=_spread(waited, lambda x: x.started_s - x.request.at_s),
        attainment=None if kept is None else kept / max(1, len(online)),
        goodput_req_s=None if kept is None else kept / duration_s,
        hit_share=sum(life.cached for life in served) / max(1, prompts),
        num_restarts=sum(life.num_restarts for life in outcome.lives),
        num_preempted=sum(life.num_preempted for life in outcome.lives),
        mean_in_flight=outcome.area / duration_s,
        utilisation=sum(m.num_busy_s for m in outcome.members) / max(1e-9, sum(paid_s)),
        device_hours=sum(
            m.build.num_devices * span for m, span in zip(outcome.members, paid_s, strict=True)
        )
        / 3600,
        most_replicas=max((count for _, count in outcome.num_replicas), default=0),
        num_steps=outcome.num_steps,
        batch=_batch(outcome.lives),
    )


def by_build(outcome: FleetOutcome) -> list[tuple[str, int, float]]:
    """Of each kind of replica: its name, requests served, share of its time that it was busy."""
    served: dict[str, int] = {}
    busy_s: dict[str, float] = {}
    paid_s: dict[str, float] = {}
    for member in outcome.members:
        name = member.build.name
        busy_s[name] = busy_s.get(name, 0.0) + member.num_busy_s
        span_s = min(member.until_s, outcome.duration_s) - member.from_s
        paid_s[name] = paid_s.get(name, 0.0) + span_s
    for life in outcome.lives:
        if life.finished_s == life.finished_s:
            name = outcome.members[life.replica].build.name
            served[name] = served.get(name, 0) + 1
    return [(name, served.get(name, 0), busy_s[name] / max(1e-9, paid_s[name])) for name in busy_s]


def _batch(lives: Sequence[RequestOutcome]) -> BatchSummary | None:
    lines = [life for life in lives if life.request.background]
    done = [life for life in lines if life.finished_s == life.finished_s]
    if not lines:
        return None
    return BatchSummary(
        num_lines=len(lines),
        num_served=len(done),
        took=_spread(done, lambda x: x.finished_s - max(x.request.at_s, x.request.not_before_s)),
    )


def tpot_of(life: RequestOutcome) -> float:
    """Seconds per token after the first."""
    return (life.finished_s - life.first_s) / (life.request.num_output - 1)


def meets_slo(life: RequestOutcome, slo: Slo) -> bool:
    """Whether a served request was seen to keep the promise; a single token has no TPOT."""
    ttft_s = life.first_s - life.request.at_s
    tpot_s = tpot_of(life) if life.request.num_output > 1 else None
    return not slo.misses(ttft_s, tpot_s, life.finished_s - life.request.at_s)


def _spread(
    lives: Sequence[RequestOutcome], value: Callable[[RequestOutcome], float]
) -> LatencySpread | None:
    if not lives:
        return None
    values = np.array([value(life) for life in lives])
    p50, p90, p95, p99 = (float(q) for q in np.percentile(values, PERCENTILES))
    return LatencySpread(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def traces(outcome: FleetOutcome, most: int) -> tuple[RequestTrace, ...]:
    """At most `most` requests, evenly chosen, as everybody else writes them.

    The tokens after the first are one chunk at the end: their own instants are not kept.
    """
    step = max(1, math.ceil(len(outcome.lives) / most))
    return tuple(
        _trace(str(i), outcome.lives[i], outcome.duration_s)
        for i in range(0, len(outcome.lives), step)
    )


def _trace(name: str, life: RequestOutcome, end_s: float) -> RequestTrace:
    done = life.finished_s == life.finished_s
    asked = life.request.num_output
    tokens: tuple[float, ...] = ()
    if done:
        tokens = (life.first_s, life.finished_s) if asked > 1 else (life.first_s,)
    return RequestTrace(
        id=name,
        kind=life.request.kind,
        scheduled_s=life.request.at_s,
        sent_s=life.request.at_s,
        started_s=None if math.isnan(life.started_s) else life.started_s,
        token_s=tokens,
        token_counts=(1, asked - 1)[: len(tokens)],
        finished_s=life.finished_s if done else end_s,
        prompt_tokens=life.request.num_prompt,
        cached_tokens=life.cached,
        output_tokens=asked if done else 0,
        asked_tokens=asked,
        finish_reason="length" if done else "abort",
        error=None if done else life.error,
    )
