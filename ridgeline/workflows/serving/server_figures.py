"""A server's /metrics as a few figures: levels, rates, and latency quantiles.

Quantiles are interpolated within the buckets of histograms, between two snapshots or since the
server's start. Rates are between the two latest snapshots. A figure that the server does not
export is absent, never zero.
"""

from __future__ import annotations

import math

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.errors import BadInput

Buckets = dict[float, float]
"""Upper edge → number of observations up to it."""

_LEVELS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_used_share": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
    "batch_requests_running": "ridgeline_batch_requests_running",
    "batch_requests_open": "ridgeline_batch_requests_open",
    "fill_share": "ridgeline_batch_fill_ratio",
    "cost_per_million": "ridgeline_cost_per_million_tokens",
}
_RATES = {
    "output_tok_s": "vllm:generation_tokens_total",
    "prompt_tok_s": "vllm:prompt_tokens_total",
    "batch_tok_s": "ridgeline_batch_tokens_total",
}
_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
_PERCENTILES = (50, 95)


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """/metrics at an instant: values by name, summed over labels, and histograms by stem."""

    at_s: float
    values: dict[str, float]
    buckets: dict[str, Buckets]


def parse_metrics(text: str, at_s: float) -> MetricsSnapshot:
    """Parse a Prometheus page. Raises BadInput if it is none."""
    values: dict[str, float] = {}
    buckets: dict[str, Buckets] = {}
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError as error:
        raise BadInput(f"the server's /metrics is not Prometheus text: {error}") from None
    for sample in samples:
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
        if sample.name.endswith("_bucket"):
            edges = buckets.setdefault(sample.name.removesuffix("_bucket"), {})
            edge = float(sample.labels["le"])
            edges[edge] = edges.get(edge, 0.0) + sample.value
    return MetricsSnapshot(at_s, values, buckets)


def quantile(now: Buckets, before: Buckets, share: float) -> float | None:
    """A quantile of the observations between two snapshots; None if there are none."""
    counts = [(edge, n - before.get(edge, 0.0)) for edge, n in sorted(now.items())]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    low = below = 0.0
    for edge, up_to in counts:
        if up_to >= share * total:
            if math.isinf(edge):
                return low
            return low + (edge - low) * (share * total - below) / max(up_to - below, 1e-9)
        low, below = edge, up_to
    return low


def server_figures(
    now: MetricsSnapshot, previous: MetricsSnapshot | None, start: MetricsSnapshot | None
) -> dict[str, float]:
    """The figures by name.

    Rates are since `previous`. Latencies and cache hits are since `start`, or since the server's
    start if it is None.
    """
    figures = {name: now.values.get(key, math.nan) for name, key in _LEVELS.items()}
    figures = {name: value for name, value in figures.items() if math.isfinite(value)}
    for name, key in _RATES.items():
        if previous is not None and key in now.values and now.at_s > previous.at_s:
            increase = now.values[key] - previous.values.get(key, 0.0)
            figures[name] = max(0.0, increase) / (now.at_s - previous.at_s)
    queries = _increase(now, start, "vllm:prefix_cache_queries_total")
    if queries > 0:
        figures["hit_share"] = _increase(now, start, "vllm:prefix_cache_hits_total") / queries
    for name, stem in _LATENCIES.items():
        before = start.buckets.get(stem, {}) if start is not None else {}
        for percentile in _PERCENTILES:
            value = quantile(now.buckets.get(stem, {}), before, percentile / 100)
            if value is not None:
                figures[f"{name}_p{percentile}_s"] = value
    return figures


def _increase(now: MetricsSnapshot, start: MetricsSnapshot | None, key: str) -> float:
    before = start.values.get(key, 0.0) if start is not None else 0.0
    return now.values.get(key, 0.0) - before
