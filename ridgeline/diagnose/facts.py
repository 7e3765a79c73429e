"""The named numbers that rules and verdicts look at, as pure functions of a run's records.

Names carry their unit: `_s` seconds, `_share` 0..1, `_bytes`, `_tok_s`. A number that the run
cannot tell (an HTTP server without step records, say) is absent, never zero.
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
"""Between two tokens of a stream that nobody promised anything of: at ten a second most people read
along, and a shorter stop is not seen."""

LEAST_REQUESTS = 20
"""To tell a queue that grows from a few that waited."""
LEAST_GROWTH = 0.02
"""Seconds per second: less is chance."""


def facts_of(
    run: RunTrace, slo: Slo | None = None, shares: TimeShares | None = None
) -> dict[str, Value]:
    """Everything that the rules may name and that this run can tell."""
    facts: dict[str, Value] = {}
    facts.update(_request_facts(run))
    facts.update(_step_facts(run.steps))
    if shares is not None:
        facts.update({f"{name}_share": getattr(shares, name) for name in shares.__struct_fields__})
    if slo is not None:
        limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
        facts.update({f"slo_{name}_s": limit for name, limit in limits.items() if limit})
    promised_s = None if slo is None else slo.tpot_s
    facts["smooth_gap_s"] = promised_s or READING_GAP_S
    if run.info is not None:
        facts.update(engine_facts(run.info.settings))
        if run.info.weight_bytes:  # a server elsewhere does not tell
            facts["weight_bytes"] = run.info.weight_bytes
    if run.client_cpu_share is not None:
        facts["client_cpu_share"] = run.client_cpu_share
    return facts


def engine_facts(settings: dict[str, object]) -> dict[str, Value]:
    """The engine's resolved settings, under their own names."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in settings.items() if isinstance(value, plain)}


def ttft_s(request: RequestTrace) -> float | None:
    """From the scheduled arrival: a client that sends late does not hide the queue."""
    return request.token_s[0] - request.scheduled_s if request.token_s else None


def tpot_s(request: RequestTrace) -> float | None:
    """Per output token without the first; undefined (never zero) for one token."""
    if not request.token_s or request.output_tokens < 2:
        return None
    after_first = request.output_tokens - request.token_counts[0]
    if after_first < 1:
        return None
    return (request.token_s[-1] - request.token_s[0]) / after_first


def gaps_s(request: RequestTrace) -> list[float]:
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
    told = [
        (r.started_s - r.scheduled_s, ttft_s(r) or 0.0) for r in done if r.started_s is not None
    ]
    if not told:
        return {}
    waited, total = sum(wait for wait, _ in told), sum(ttft for _, ttft in told)
    return {
        "queue_p95_s": percentile([wait for wait, _ in told], 95),
        "queue_of_ttft_share": min(1.0, waited / total) if total > 0 else 0.0,
    }


def _growth(run: RunTrace, done: Sequence[RequestTrace]) -> dict[str, Value]:
    """By how much a request waited longer for its first token than one that came a second before
    it, where a queue grows: when f times what can be served comes, by f - 1. Unknown of a closed
    loop, where nobody comes before somebody leaves, and where all came while the first were served.
    """
    came = [request.scheduled_s for request in done]
    if len(done) < LEAST_REQUESTS or run.arrivals.startswith("closed"):
        return {}
    decoding_s = percentile([request.token_s[-1] - request.token_s[0] for request in done], 50)
    if max(came) - min(came) <= 2 * decoding_s:
        return {}
    waited = [ttft_s(request) or 0.0 for request in done]
    slope = statistics.linear_regression(came, waited).slope
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
