"""A run's result in the keys of `vllm bench serve --save-result`, which existing scripts read.

Values follow vLLM's definitions: latencies count from the *send*, `itls` are gaps between chunks,
percentiles are over successful requests. Ridgeline's own figures are under `ridgeline`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from ridgeline.measure.metrics.latency import (
    Distribution,
    by_input_length,
    distribution,
    e2e_s,
    itl_chunk_s,
    outcome,
    pool_values,
    split,
    successful_requests,
    tpot_s,
    ttft_s,
)
from ridgeline.measure.metrics.summary import Summary
from ridgeline.measure.workload.arrivals import Closed, Renewal, parse_arrivals
from ridgeline.records import RequestTrace, RunTrace


def vllm_result(
    run: RunTrace, summary: Summary, *, percentiles: Sequence[float] = (99.0,)
) -> dict[str, object]:
    """Plain values for JSON; an unlimited rate is the string "inf"."""
    done = successful_requests(run.requests)
    result: dict[str, object] = {
        "date": start_date(run),
        "endpoint_type": run.target,
        "backend": run.target,
        "label": None,
        "model_id": run.info.model if run.info else run.target,
        "tokenizer_id": run.info.model if run.info else run.target,
        "num_prompts": len(run.requests),
        **_load(run),
        "duration": run.duration_s,
        "completed": len(done),
        "failed": len(run.requests) - len(done),
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_rate,
        "request_goodput": summary.goodput.goodput_req_s if summary.goodput else None,
        "output_throughput": summary.output_tok_s,
        "total_token_throughput": summary.input_tok_s + summary.output_tok_s,
        "max_output_tokens_per_s": _peak_tokens_per_second(done),
        "max_concurrent_requests": summary.peak_concurrency,
    }
    for name, values in _distributions(done).items():
        result |= _statistics(name, values, percentiles)
    return result | _details(run.requests) | {"ridgeline": _ours(run, summary)}


def start_date(run: RunTrace) -> str:
    """Start of the run in UTC, in vLLM's format."""
    return datetime.fromtimestamp(run.started_unix_s, UTC).strftime("%Y%m%d-%H%M%S")


def _load(run: RunTrace) -> dict[str, object]:
    label, _, cap = run.arrivals.partition(" cap:")
    process = None if label.startswith("replay") else parse_arrivals(label)
    rate = math.inf if process is None or process.rate is None else process.rate
    burstiness = process.burstiness if isinstance(process, Renewal) else 1.0
    limit = process.concurrency if isinstance(process, Closed) else int(cap) if cap else None
    return {
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": burstiness if math.isfinite(burstiness) else "inf",
        "max_concurrency": limit,
    }


def _peak_tokens_per_second(done: Sequence[RequestTrace]) -> float:
    """The largest number of tokens in a whole second since the first send."""
    begin_s = min((request.sent_s for request in done), default=0.0)
    seconds: Counter[int] = Counter()
    for request in done:
        for at_s, count in zip(request.token_s, request.token_counts, strict=True):
            seconds[int(at_s - begin_s)] += count
    return float(max(seconds.values(), default=0))


def _distributions(done: Sequence[RequestTrace]) -> dict[str, Distribution | None]:
    return {
        "ttft": distribution(ttft_s(request, "sent") for request in done),
        "tpot": distribution(map(tpot_s, done)),
        "itl": pool_values(done, itl_chunk_s),
        "e2el": distribution(e2e_s(request, "sent") for request in done),
    }


def _statistics(
    name: str, values: Distribution | None, percentiles: Sequence[float]
) -> dict[str, object]:
    """Milliseconds; zeros if nothing was observed, as vLLM writes them."""
    statistics: dict[str, float] = {
        f"mean_{name}_ms": values.mean if values else 0.0,
        f"median_{name}_ms": values.p(50) if values else 0.0,
        f"std_{name}_ms": values.std if values else 0.0,
    }
    for q in percentiles:
        statistics[f"p{q:g}_{name}_ms"] = values.p(q) if values else 0.0
    return {key: 1000 * value for key, value in statistics.items()}


def _details(requests: Sequence[RequestTrace]) -> dict[str, object]:
    return {
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [
            request.output_tokens if outcome(request) == "ok" else 0 for request in requests
        ],
        "ttfts": [ttft_s(request, "sent") or 0.0 for request in requests],
        "itls": [itl_chunk_s(request) for request in requests],
        "latencies": [e2e_s(request, "sent") or 0.0 for request in requests],
        "start_times": [request.sent_s for request in requests],
        "queue_times": [request.sent_s - request.scheduled_s for request in requests],
        "generated_texts": [request.text for request in requests],
        "errors": [request.error or "" for request in requests],
    }


def _by_input_length(run: RunTrace) -> dict[str, dict[str, float]]:
    """Requests and p50 and p99 of TTFT and TPOT, in ms, by bucket of prompt tokens."""
    buckets: dict[str, dict[str, float]] = {}
    for name, part in split(run, by_input_length).items():
        done = [request for request in part.requests if outcome(request) == "ok"]
        row: dict[str, float] = {"requests": len(part.requests)}
        for metric, of in (("ttft", ttft_s), ("tpot", tpot_s)):
            values = distribution(map(of, done))
            if values is not None:
                row |= {f"p{q}_{metric}_ms": 1000 * values.p(q) for q in (50, 99)}
        buckets[name] = row
    return buckets


def _ours(run: RunTrace, summary: Summary) -> dict[str, object]:
    scheduled = {
        f"p{q}_{name}_ms": 1000 * values.p(q)
        for name, values in (
            ("ttft", summary.ttft),
            ("visible", summary.visible),
            ("e2e", summary.e2e),
            ("itl", summary.itl),
            ("queue", summary.queue),
            ("publish", summary.publish),
        )
        if values is not None
        for q in (50, 90, 95, 99)
    }
    return {
        "workload": run.workload,
        "seed": run.seed,
        "request_ids": [request.id for request in run.requests],
        "settings": dict(run.info.settings) if run.info else {},
        "base": "latencies from the scheduled arrival",
        **scheduled,
        "mean_tpot_ms": 1000 * summary.tpot.mean if summary.tpot is not None else None,
        "mean_user_tok_s": summary.user_tok_s.mean if summary.user_tok_s is not None else None,
        "mean_fluidity": summary.fluidity.mean if summary.fluidity is not None else None,
        "queue_age_mean_s": None if summary.queue_age is None else summary.queue_age.mean_s,
        "queue_age_max_s": None if summary.queue_age is None else summary.queue_age.max_s,
        "wasted_slots": None if summary.occupancy is None else summary.occupancy.wasted_slots,
        "wasted_steps": None if summary.occupancy is None else summary.occupancy.wasted_steps,
        "tokens_counted_by": dict(summary.counted_by),
        "completed_per_min": 60 * summary.request_rate,
        "by_input_length": _by_input_length(run),
        "attainment": summary.goodput.attainment if summary.goodput else None,
        "offered_rate": summary.offered_rate,
        "steady_output_throughput": summary.steady_output_tok_s,
        "output_ratio": summary.output_ratio,
        "invalid": list(summary.validity.reasons),
        "cpu_taken_share": None if run.machine_load is None else run.machine_load.taken_share,
    }
