"""How servers name what alerts and dashboards need.

Sources: vLLM `vllm/v1/metrics/loggers.py`, SGLang `python/sglang/srt/metrics/collector.py`, TGI
`docs/source/reference/metrics.md`. `met` and `requests` count requests per SLO class: only
Ridgeline judges each request. Elsewhere latencies are judged by histograms, all requests alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

ServerName = Literal["ridgeline", "vllm", "sglang", "tgi"]


class ServerSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Series of one kind of server; None where it has none. Histograms without `_bucket`."""

    title: str
    alive: str
    running: str
    waiting: str
    ttft: str | None = None
    tpot: str | None = None
    e2e: str
    requests: str | None = None
    met: str | None = None
    missed: str | None = None
    queue_age: str | None = None
    kv_usage: str | None = None
    preemptions: str | None = None
    prefix_hits: str | None = None
    prefix_queries: str | None = None
    output_tokens: str


_VLLM = ServerSeries(
    title="vLLM",
    alive="vllm:num_requests_running",
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    ttft="vllm:time_to_first_token_seconds",
    tpot="vllm:request_time_per_output_token_seconds",
    e2e="vllm:e2e_request_latency_seconds",
    kv_usage="vllm:kv_cache_usage_perc",
    preemptions="vllm:num_preemptions_total",
    prefix_hits="vllm:prefix_cache_hits_total",
    prefix_queries="vllm:prefix_cache_queries_total",
    output_tokens="vllm:generation_tokens_total",
)
SERVERS: Mapping[ServerName, ServerSeries] = MappingProxyType(
    {
        "ridgeline": msgspec.structs.replace(
            _VLLM,
            title="Ridgeline",
            alive="ridgeline_engine_alive",
            requests="ridgeline_slo_requests_total",
            met="ridgeline_slo_met_total",
            missed="ridgeline_slo_missed_total",
            queue_age="ridgeline_queue_age_seconds",
        ),
        "vllm": _VLLM,
        "sglang": ServerSeries(
            title="SGLang",
            alive="sglang:num_running_reqs",
            running="sglang:num_running_reqs",
            waiting="sglang:num_queue_reqs",
            ttft="sglang:time_to_first_token_seconds",
            tpot="sglang:inter_token_latency_seconds",
            e2e="sglang:e2e_request_latency_seconds",
            kv_usage="sglang:token_usage",
            output_tokens="sglang:generation_tokens_total",
        ),
        "tgi": ServerSeries(
            title="Text Generation Inference",
            alive="tgi_queue_size",
            running="tgi_batch_current_size",
            waiting="tgi_queue_size",
            tpot="tgi_request_mean_time_per_token_duration",
            e2e="tgi_request_duration",
            output_tokens="tgi_request_generated_tokens_sum",
        ),
    }
)
