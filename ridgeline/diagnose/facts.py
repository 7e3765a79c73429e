"""Facts: the named numbers that rules and verdicts use, as pure functions of a run's records.

Names end with their unit: `_s` seconds, `_share` 0..1, `_bytes`, `_tok_s`. A number that cannot be
derived from the run (for example from an HTTP server without step records) is absent, never zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ridgeline.diagnose.conditions import Value
from ridgeline.diagnose.roofline.phase_points import TimeShares
from ridgeline.records import RequestTrace, RunTrace, Slo, StepStat
from ridgeline.roofline import phase_of
from ridgeline.stats import percentile

READING_GAP_S = 0.1
"""Longest gap between two tokens that counts as smooth if there is no SLO on TPOT. Ten tokens per
second is faster than most people read, so that a shorter pause goes unnoticed."""

LEAST_REQUESTS = 20
"""Fewer requests cannot show whether the queue is growing."""
LEAST_GROWTH = 0.02
"""Seconds of additional wait per second of arrivals; a smaller slope can be chance."""


def facts_of(
    run: RunTrace, slo: Slo | None = None, shares: TimeShares | None = None
) -> dict[str, Value]:
    """All facts that can be derived from this run."""
    facts: dict[str, Value] = {}
    facts.update(_request_facts(run))
    facts.update(_step_facts(run.steps))
    if shares is not None:
        facts.update({f"{name}_share": getattr(shares, name) for name in shares.__struct_fields__})
    if slo is not None:
        limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
        facts.update({f"slo_{name}_s": limit for name, limit in limits.items() if limit})
    slo_tpot_s = None if slo is None else slo.tpot_s
    facts["smooth_gap_s"] = slo_tpot_s or READING_GAP_S
    if run.info is not None:
        facts.update(engine_facts(run.info.settings))
        if run.info.weight_bytes:  # unknown for an external server
            facts["weight_bytes"] = run.info.weight_bytes
    if run.client_cpu_share is not None:
        facts["client_cpu_share"] = run.client_cpu_share
    if run.machine_load is not None:
        facts["machine_taken_share"] = run.machine_load.taken_share
    return facts


def engine_facts(settings: dict[str, object]) -> dict[str, Value]:
    """The engine's resolved settings, under their own names."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in settings.items() if isinstance(value, plain)}


def ttft_s(request: RequestTrace) -> float | None:
    """Time to first token from the scheduled arrival, so that a slow client hides no delay."""
    return request.token_s[0] - request.scheduled_s if request.token_s else None


def tpot_s(request: RequestTrace) -> float | None:
    """Time per output token after the first; None if there is only one token."""
    if not request.token_s or request.output_tokens < 2:
        return None
    after_first = request.output_tokens - request.token_counts[0]
    if after_first < 1:
        return None
    return (request.token_s[-1] - request.token_s[0]) / after_first


def gaps_s(request: RequestTrace) -> list[float]:
    """Times between consecutive tokens."""
    return [b - a for a, b in zip(request.token_s, request.token_s[1:], strict=False)]


def _request_facts(run: RunTrace) -> dict[str, Value]:
    done = [request for request in run.requests if request.error is None and request.token_s]
    facts: dict[str, Value] = {"num_requests": len(run.requests)}
    if not run.requests:
        return facts
    facts["failed_share"] = sum(1 for r in run.requests if r.error is not None) / len(run.requests)
    samples = {
        "ttft": [value for value in map(ttft_s, done) if value is not None],
        "tpot": [value for value in map(tpot_s, done) if value is not None],
        "itl": [gap for request in done for gap in gaps_s(request)],
        "send_lag": [request.sent_s - request.scheduled_s for request in run.requests],
    }
    for name, values in samples.items():
        for q in (50, 95, 99) if values else ():
            facts[f"{name}_p{q}_s"] = percentile(values, q)
    facts.update(_token_facts(done, run.duration_s))
    facts.update(_queue_facts(done))
    facts.update(_growth(run, done))
    return facts


def _token_facts(done: Sequence[RequestTrace], duration_s: float) -> dict[str, Value]:
    prompt = sum(request.prompt_tokens for request in done)
    if not done or not prompt:
        return {}
    output = sum(request.output_tokens for request in done)
    return {
        "cached_prompt_share": sum(request.cached_tokens for request in done) / prompt,
        "mean_prompt_tokens": prompt / len(done),
        "mean_output_tokens": output / len(done),
        "output_tok_s": output / duration_s if duration_s > 0 else 0.0,
    }


def _queue_facts(done: Sequence[RequestTrace]) -> dict[str, Value]:
    """How much of the time to first token was spent waiting for a slot."""
    waits = [
        (r.started_s - r.scheduled_s, ttft_s(r) or 0.0) for r in done if r.started_s is not None
    ]
    if not waits:
        return {}
    waited, total = sum(wait for wait, _ in waits), sum(ttft for _, ttft in waits)
    return {
        "queue_p95_s": percentile([wait for wait, _ in waits], 95),
        "queue_of_ttft_share": min(1.0, waited / total) if total > 0 else 0.0,
    }


def _growth(run: RunTrace, done: Sequence[RequestTrace]) -> dict[str, Value]:
    """How much longer a request waits for its first token than one that arrived a second earlier.

    Under a load of f times the capacity this is f - 1. It is unknown for a closed loop, where each
    arrival waits for a departure, and if all requests arrived while the first were being served.
    """
    arrivals_s = [request.scheduled_s for request in done]
    if len(done) < LEAST_REQUESTS or run.arrivals.startswith("closed"):
        return {}
    decoding_s = percentile([request.token_s[-1] - request.token_s[0] for request in done], 50)
    if max(arrivals_s) - min(arrivals_s) <= 2 * decoding_s:
        return {}
    waited = [ttft_s(request) or 0.0 for request in done]
    slope = statistics.linear_regression(arrivals_s, waited).slope
    return {"wait_growth_s": slope} if slope >= LEAST_GROWTH else {}


def _step_facts(steps: Sequence[StepStat]) -> dict[str, Value]:
    busy = sum(step.run_s for step in steps)
    if not steps or busy <= 0:
        return {}
    timed = [(step, step.run_s) for step in steps]
    queried = sum(step.queried_tokens for step in steps)
    facts: dict[str, Value] = {
        "num_steps": len(steps),
        "step_p50_s": percentile([step.run_s for step in steps], 50),
        "step_p99_s": percentile([step.run_s for step in steps], 99),
        "mean_running": _mean((step.num_running, t) for step, t in timed),
        "mean_waiting": _mean((step.num_waiting, t) for step, t in timed),
        "batch_fill_share": _mean(
            (step.num_running / max(1, step.max_num_seqs), t) for step, t in timed
        ),
        "kv_used_share": percentile([s.used_blocks / max(1, s.num_blocks) for s in steps], 95),
        "waiting_time_share": sum(t for step, t in timed if step.num_waiting) / busy,
        "mixed_step_share": sum(t for step, t in timed if phase_of(step) != "decode") / busy,
        "preemptions": sum(step.num_preempted for step in steps),
    }
    if queried:
        facts["prefix_hit_share"] = sum(step.hit_tokens for step in steps) / queried
    return facts


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
