"""Goodput: requests per second that met the SLO.

A request *meets* an SLO if it succeeded, exceeded no limit, and at least one limit could be
observed. Failed, timed-out and cancelled requests miss it; they stay in the denominator. A limit
that cannot be observed (TPOT of a one-token answer) is not checked; if none can be, the request
counts as missed. TTFT and E2E count from the scheduled arrival.

Goodput can be raised by giving up on late requests ("smooth goodput", arXiv 2410.14257): read it
together with the failed and missed counts. `fluidity` measures the pace of single tokens.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal

import msgspec

from ridgeline.measure.metrics.latency import e2e_s, outcome, tpot_s, ttft_s
from ridgeline.records import RequestTrace, RunTrace, Slo
from ridgeline.stats import wilson_interval

Verdict = Literal["met", "failed", "unobserved", "ttft", "tpot", "e2e"]

MAX_CLIENT_CPU_SHARE = 0.8
MAX_SEND_LAG_S = 0.05
SEND_LAG_OF_TTFT = 0.1
MIN_OUTPUT_RATIO = 0.95


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """One run under one SLO. `attainment` has a 95 % Wilson interval.

    A request that missed several limits counts once for each of them in `misses`.
    """

    num_requests: int
    num_met: int
    num_failed: int
    goodput_req_s: float
    attainment: float
    attainment_low: float
    attainment_high: float
    holds: bool
    misses: dict[str, int]


def verdicts(request: RequestTrace, slo: Slo) -> tuple[Verdict, ...]:
    """("met",), or every reason for which the request missed the SLO."""
    if outcome(request) != "ok":
        return ("failed",)
    return slo.misses(ttft_s(request), tpot_s(request), e2e_s(request)) or ("met",)


def meets(request: RequestTrace, slo: Slo) -> bool:
    return verdicts(request, slo) == ("met",)


def goodput(run: RunTrace, slo: Slo) -> Goodput:
    """Goodput of a run. Without requests, the attainment is 0."""
    judged = [verdicts(request, slo) for request in run.requests]
    misses: Counter[str] = Counter(
        reason for reasons in judged for reason in reasons if reason != "met"
    )
    total, met = len(judged), judged.count(("met",))
    attainment = met / total if total else 0.0
    interval = wilson_interval(met, total)
    failed = misses["failed"]
    return Goodput(
        num_requests=total,
        num_met=met,
        num_failed=failed,
        goodput_req_s=met / run.duration_s if run.duration_s > 0 else 0.0,
        attainment=attainment,
        attainment_low=interval.low,
        attainment_high=interval.high,
        holds=total > 0 and attainment >= slo.attainment and failed <= slo.error_rate * total,
        misses=dict(misses),
    )


class Validity(msgspec.Struct, frozen=True):
    """Whether a run measured its server; `reasons` why it may not have."""

    reasons: tuple[str, ...]

    @property
    def valid(self) -> bool:
        return not self.reasons


def validity_of(run: RunTrace) -> Validity:
    """Check for a client that was the bottleneck, times out of order, and short outputs."""
    return Validity(tuple(filter(None, (_cpu(run), _lag(run), _clock(run), _lengths(run)))))


def _cpu(run: RunTrace) -> str | None:
    share = run.client_cpu_share
    if share is None or share <= MAX_CLIENT_CPU_SHARE:
        return None
    return f"the load client used {share:.0%} of a core: it may have been the bottleneck"


def _lag(run: RunTrace) -> str | None:
    """Late sends matter in absolute terms, or relative to the latency that they distort."""
    lag_s = run.send_lag_p99_s
    if lag_s is None:
        return None
    ttfts = [v for v in (ttft_s(r, "sent") for r in run.requests) if v is not None]
    limit_s = MAX_SEND_LAG_S
    if ttfts:
        limit_s = min(limit_s, max(0.010, SEND_LAG_OF_TTFT * sorted(ttfts)[len(ttfts) // 2]))
    if lag_s <= limit_s:
        return None
    return f"the load client sent late (p99 {lag_s * 1000:.0f} ms, limit {limit_s * 1000:.0f} ms)"


def _clock(run: RunTrace) -> str | None:
    backwards = sum(1 for request in run.requests if not _is_ordered(request))
    return f"{backwards} requests have times out of order" if backwards else None


def _is_ordered(request: RequestTrace) -> bool:
    times = [request.scheduled_s, request.sent_s, *request.token_s]
    return all(before <= after for before, after in pairwise(times))


def _lengths(run: RunTrace) -> str | None:
    ratio = output_ratio(run)
    if ratio is None or ratio >= MIN_OUTPUT_RATIO:
        return None
    return (
        f"the server generated {ratio:.0%} of the requested tokens: it stops early (without "
        "ignore_eos?), so that the load is lighter than specified"
    )


def output_ratio(run: RunTrace) -> float | None:
    """Output tokens over requested tokens, of successful requests; None if none is known."""
    done = [r for r in run.requests if outcome(r) == "ok" and r.requested_tokens]
    requested = sum(request.requested_tokens or 0 for request in done)
    return sum(request.output_tokens for request in done) / requested if requested else None
