"""Metrics of a simulated fleet: latency, goodput, utilisation, device-hours. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ridgeline.plan.simulate.records import FleetOutcome, RequestOutcome
from ridgeline.records import RequestTrace, Slo
from ridgeline.stats import percentile

PERCENTILES = (50, 90, 95, 99)


class LatencySpread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds over the finished requests: mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Batch requests, which have no SLO.

    `e2e` starts at the arrival, or, without a deadline, at the opening of the request's off-peak
    window if that is later. `num_expired`: those that were not served by their deadline.
    """

    num_requests: int
    num_served: int
    num_expired: int
    e2e: LatencySpread | None


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one model of several, as in `FleetSummary`."""

    num_requests: int
    num_served: int
    request_rate: float
    output_tok_s: float
    ttft: LatencySpread | None
    tpot: LatencySpread | None
    e2e: LatencySpread | None
    attainment: float | None


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and rates cover all requests; latencies and the SLO only interactive ones.

    Latencies start at the arrival. `attainment` is the share of interactive requests that met the
    SLO, unfinished ones included; `goodput_req_s` is their rate. `utilisation` is the share of the
    replicas' paid time in which a step was under way; `device_hours` is the paid time. `tier_share`
    is the part of `hit_share` that came from each tier below the prefix cache, `declined_share` the
    share of prompt tokens that were there but quicker to compute. `resumed_tokens` were generated
    by replicas that failed, and not again. `models`: each of several models by itself.
    `answered_share`: of the served requests, those that a response cache answered; `hit_share` is
    of the others.
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
    tier_share: dict[str, float] = {}
    declined_share: float = 0.0
    batch: BatchSummary | None = None
    resumed_tokens: int = 0
    models: dict[str, ModelSummary] = {}
    answered_share: float = 0.0


def summarise(outcome: FleetOutcome, slo: Slo | None) -> FleetSummary:
    """Metrics of one simulation."""
    served = [request for request in outcome.requests if not math.isnan(request.finished_s)]
    duration_s = max(outcome.duration_s, 1e-9)
    tokens = sum(request.request.num_output for request in served)
    prompts = sum(request.request.num_prompt for request in served if not request.answered)
    interactive = [request for request in outcome.requests if not request.request.background]
    interactive_done = [request for request in served if not request.request.background]
    num_met = None if slo is None else sum(meets_slo(request, slo) for request in interactive_done)
    paid_s = [min(m.until_s, outcome.duration_s) - m.from_s for m in outcome.replicas]
    return FleetSummary(
        num_requests=len(outcome.requests),
        num_served=len(served),
        duration_s=outcome.duration_s,
        request_rate=len(served) / duration_s,
        output_tok_s=tokens / duration_s,
        ttft=_spread(interactive_done, lambda x: x.first_s - x.request.at_s),
        tpot=_spread([x for x in interactive_done if x.request.num_output > 1], tpot_of),
        e2e=_spread(interactive_done, lambda x: x.finished_s - x.request.at_s),
        queue=_spread(interactive_done, lambda x: x.started_s - x.request.at_s),
        attainment=None if num_met is None else num_met / max(1, len(interactive)),
        goodput_req_s=None if num_met is None else num_met / duration_s,
        hit_share=sum(request.cached for request in served) / max(1, prompts),
        num_restarts=sum(request.num_restarts for request in outcome.requests),
        num_preempted=sum(request.num_preempted for request in outcome.requests),
        mean_in_flight=outcome.area / duration_s,
        utilisation=sum(m.num_busy_s for m in outcome.replicas) / max(1e-9, sum(paid_s)),
        device_hours=sum(
            m.config.num_devices * span for m, span in zip(outcome.replicas, paid_s, strict=True)
        )
        / 3600,
        most_replicas=max((count for _, count in outcome.num_replicas), default=0),
        num_steps=outcome.num_steps,
        tier_share={k: n / max(1, prompts) for k, n in outcome.tiers.hit_tokens.items()},
        declined_share=outcome.tiers.declined_tokens / max(1, prompts),
        batch=_batch(outcome.requests),
        resumed_tokens=sum(request.num_resumed for request in outcome.requests),
        models=_by_model(outcome.requests, slo, duration_s),
        answered_share=sum(request.answered for request in served) / max(1, len(served)),
    )


def _by_model(
    requests: Sequence[RequestOutcome], slo: Slo | None, duration_s: float
) -> dict[str, ModelSummary]:
    """Interactive requests by the model that they name; {} if all name the same."""
    groups: dict[str, list[RequestOutcome]] = {}
    for outcome in requests:
        if not outcome.request.background:
            groups.setdefault(outcome.request.model, []).append(outcome)
    if len(groups) < 2:
        return {}
    found = {}
    for name, group in sorted(groups.items()):
        done = [outcome for outcome in group if not math.isnan(outcome.finished_s)]
        met = None if slo is None else sum(meets_slo(outcome, slo) for outcome in done)
        found[name] = ModelSummary(
            num_requests=len(group),
            num_served=len(done),
            request_rate=len(done) / duration_s,
            output_tok_s=sum(outcome.request.num_output for outcome in done) / duration_s,
            ttft=_spread(done, lambda x: x.first_s - x.request.at_s),
            tpot=_spread([x for x in done if x.request.num_output > 1], tpot_of),
            e2e=_spread(done, lambda x: x.finished_s - x.request.at_s),
            attainment=None if met is None else met / len(group),
        )
    return found


def by_config(outcome: FleetOutcome) -> list[tuple[str, int, float]]:
    """For each kind of replica: its name, finished requests, and utilisation."""
    served: dict[str, int] = {}
    busy_s: dict[str, float] = {}
    paid_s: dict[str, float] = {}
    for replica in outcome.replicas:
        name = replica.config.name
        busy_s[name] = busy_s.get(name, 0.0) + replica.num_busy_s
        span_s = min(replica.until_s, outcome.duration_s) - replica.from_s
        paid_s[name] = paid_s.get(name, 0.0) + span_s
    for request in outcome.requests:
        if not math.isnan(request.finished_s):
            name = outcome.replicas[request.replica].config.name
            served[name] = served.get(name, 0) + 1
    return [(name, served.get(name, 0), busy_s[name] / max(1e-9, paid_s[name])) for name in busy_s]


def _batch(requests: Sequence[RequestOutcome]) -> BatchSummary | None:
    batch = [x for x in requests if x.request.background]
    done = [x for x in batch if not math.isnan(x.finished_s)]
    if not batch:
        return None
    return BatchSummary(
        num_requests=len(batch),
        num_served=len(done),
        num_expired=sum(
            x.request.deadline_s is not None and math.isnan(x.finished_s) for x in batch
        ),
        e2e=_spread(done, lambda x: x.finished_s - max(x.request.at_s, x.request.not_before_s)),
    )


def tpot_of(request: RequestOutcome) -> float:
    """Seconds per token after the first."""
    return (request.finished_s - request.first_s) / (request.request.num_output - 1)


def meets_slo(request: RequestOutcome, slo: Slo) -> bool:
    """Whether a finished request met the SLO; a request of one output token has no TPOT."""
    ttft_s = request.first_s - request.request.at_s
    tpot_s = tpot_of(request) if request.request.num_output > 1 else None
    return not slo.misses(ttft_s, tpot_s, request.finished_s - request.request.at_s)


def _spread(
    requests: Sequence[RequestOutcome], value: Callable[[RequestOutcome], float]
) -> LatencySpread | None:
    if not requests:
        return None
    values = [value(request) for request in requests]
    p50, p90, p95, p99 = (percentile(values, q) for q in PERCENTILES)
    return LatencySpread(mean=float(np.mean(values)), p50=p50, p90=p90, p95=p95, p99=p99)


def traces(outcome: FleetOutcome, limit: int) -> tuple[RequestTrace, ...]:
    """Traces of at most `limit` requests, evenly sampled.

    Only the times of the first and last token are known: the others form one chunk at the end.
    """
    step = max(1, math.ceil(len(outcome.requests) / limit))
    return tuple(
        _trace(str(i), outcome.requests[i], outcome.duration_s)
        for i in range(0, len(outcome.requests), step)
    )


def _trace(name: str, request: RequestOutcome, end_s: float) -> RequestTrace:
    done = not math.isnan(request.finished_s)
    asked = request.request.num_output
    tokens: tuple[float, ...] = ()
    if done:
        tokens = (request.first_s, request.finished_s) if asked > 1 else (request.first_s,)
    return RequestTrace(
        id=name,
        kind=request.request.kind,
        scheduled_s=request.request.at_s,
        sent_s=request.request.at_s,
        started_s=None if math.isnan(request.started_s) else request.started_s,
        token_s=tokens,
        token_counts=(1, asked - 1)[: len(tokens)],
        finished_s=request.finished_s if done else end_s,
        prompt_tokens=request.request.num_prompt,
        cached_tokens=request.cached,
        output_tokens=asked if done else 0,
        requested_tokens=asked,
        finish_reason="length" if done else "abort",
        error=None if done else request.error,
    )
