"""Probes, metrics and keys."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

import ridgeline
from ridgeline.config.server import ServerOptions
from ridgeline.roofline import Peaks
from ridgeline.serve.app import create_app
from ridgeline.serve.metrics.engine_collector import ENGINE_COUNTERS
from tests.serve.fake_engine import ANSWER, FakeEngine

Numbers = dict[str, float]


async def scrape(http: httpx.AsyncClient) -> Numbers:
    """Samples of /metrics by name, without the model's label."""
    reply = await http.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    samples = {}
    for line in reply.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name.replace('{model_name="fake"}', "")] = float(value)
    return samples


async def test_health_reports_the_engine(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await http.get("/health")).status_code == 200
    engine.alive = False
    reply = await http.get("/health")
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "ServiceUnavailableError"


async def test_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": ridgeline.__version__}


async def test_health_is_fast_while_requests_run(served: str) -> None:
    async with httpx.AsyncClient(base_url=served) as http:
        body = {"prompt": ["!slow"] * 20, "max_tokens": 20}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.sleep(0.05)
        latencies = []
        for _ in range(10):
            start = time.perf_counter()
            assert (await http.get("/health")).status_code == 200
            latencies.append(time.perf_counter() - start)
        assert sorted(latencies)[5] < 0.2  # a few ms on an idle machine
        assert (await running).status_code == 200


async def test_metrics_count_requests_and_tokens(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 5})
    await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 1000})
    numbers = await scrape(http)
    tokens = 5 + 4 * len(ANSWER)
    assert numbers["vllm:prompt_tokens_total"] == 6
    assert numbers["vllm:generation_tokens_total"] == tokens
    assert numbers["vllm:time_to_first_token_seconds_count"] == 5
    assert numbers["vllm:inter_token_latency_seconds_count"] == tokens - 5
    assert numbers["vllm:request_time_per_output_token_seconds_count"] == 5
    assert numbers["vllm:e2e_request_latency_seconds_count"] == 5
    assert numbers["vllm:request_queue_time_seconds_count"] == 3
    assert numbers["vllm:request_generation_tokens_sum"] == tokens
    by_reason = 'vllm:request_success_total{finished_reason="%s",model_name="fake"}'
    assert numbers[by_reason % "length"] == 1 and numbers[by_reason % "stop"] == 4
    assert numbers[by_reason % "abort"] == 0


async def test_failed_request_counts_as_aborted(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": "!fail"})
    numbers = await scrape(http)
    assert numbers['vllm:request_success_total{finished_reason="abort",model_name="fake"}'] == 1
    assert numbers["vllm:e2e_request_latency_seconds_count"] == 0


async def test_engine_counters_never_decrease(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    numbers = await scrape(http)
    assert numbers["vllm:num_requests_running"] == 1 and numbers["vllm:num_requests_waiting"] == 0
    assert numbers["vllm:prefix_cache_hits_total"] == 7
    engine.numbers = dict.fromkeys(ENGINE_COUNTERS, -1.0)
    numbers = await scrape(http)
    assert numbers["vllm:prefix_cache_hits_total"] == 7
    assert all(value >= 0 for value in numbers.values())


async def test_metric_names_are_those_of_dashboards(http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    families = set(re.findall(r"# TYPE (\S+) ", text))
    assert {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:request_success_total", "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
        "vllm:cache_config_info",
    } <= families  # fmt: skip
    assert 'block_size="16"' in text and 'num_gpu_blocks="10"' in text


async def test_apps_do_not_share_metrics(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={"prompt": "a"})
    other = httpx.ASGITransport(app=create_app(FakeEngine()))
    async with httpx.AsyncClient(transport=other, base_url="http://localhost") as fresh:
        assert (await scrape(fresh))["vllm:prompt_tokens_total"] == 0


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic sesame", "Bearer sesame "])
async def test_api_key_protects_all_but_the_open_routes(header: str | None) -> None:
    transport = httpx.ASGITransport(app=create_app(FakeEngine(), ServerOptions(api_key="sesame")))
    headers = {"authorization": header} if header else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in ("/v1/models", "/v1/completions", "/metrics", "/version", "/nothing"):
            reply = await http.post(path, json={}, headers=headers)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["type"] == "AuthenticationError"
        assert (await http.get("/health")).status_code == 200
        right = {"authorization": "Bearer sesame"}
        assert (await http.get("/v1/models", headers=right)).status_code == 200


async def test_served_model_name() -> None:
    transport = httpx.ASGITransport(
        app=create_app(FakeEngine(), ServerOptions(served_model_name="mine"))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "mine"
        reply = await http.post("/v1/completions", json={"prompt": "a", "model": "mine"})
        assert reply.json()["model"] == "mine"


def client_of(engine: FakeEngine, peaks: Peaks | None = None, **options: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerOptions(**options), peaks=peaks)
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_goodput_is_counted_by_class() -> None:
    classes = "met=ttft:60000;missed=tpot:0.001"
    async with client_of(FakeEngine(), slo_classes=classes) as http:
        for name, prompt in (("met", "x"), ("missed", "!slow"), ("missed", "!fail")):
            body = {"prompt": prompt, "slo_class": name, "max_tokens": 5}
            await http.post("/v1/completions", json=body)
        numbers = await scrape(http)
    label = '{model_name="fake",slo_class="%s"}'
    for name, num_requests, met in (("met", 1, 1), ("missed", 2, 0)):
        assert numbers["ridgeline_slo_requests_total" + label % name] == num_requests
        assert numbers.get("ridgeline_slo_met_total" + label % name, 0) == met
    missed = 'ridgeline_slo_missed_total{model_name="fake",slo_class="missed",why="%s"}'
    assert numbers[missed % "tpot"] == numbers[missed % "failed"] == 1


async def test_objective_that_could_not_be_observed_counts_as_missed() -> None:
    """As in `bench` and `simulate`: one token has no TPOT (docs/concepts/measurements.md)."""
    async with client_of(FakeEngine(), slo_classes="fast=tpot:60000") as http:
        for max_tokens in (1, 5):
            body = {"prompt": "x", "slo_class": "fast", "max_tokens": max_tokens}
            await http.post("/v1/completions", json=body)
        numbers = await scrape(http)
    label = '{model_name="fake",slo_class="fast"%s}'
    assert numbers["ridgeline_slo_requests_total" + label % ""] == 2
    assert numbers["ridgeline_slo_met_total" + label % ""] == 1
    assert numbers["ridgeline_slo_missed_total" + label % ',why="unobserved"'] == 1


async def test_own_metrics() -> None:
    engine = FakeEngine()
    engine.numbers |= {
        "recent_seqs": 30.0, "recent_slots": 40.0, "recent_busy_s": 2.0, "recent_flops": 6.0,
        "recent_bytes": 8.0, "step_tokens": 9.0, "step_tokens_le_8": 3.0, "step_tokens_le_inf": 4.0,
        "refused_requests": 5.0, "num_queued_tokens": 70.0,
    }  # fmt: skip
    peaks = Peaks(flops_s=30.0, bytes_s=10.0)
    async with client_of(engine, peaks, price_per_hour=3600.0) as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        numbers = await scrape(http)
    assert numbers["ridgeline_batch_fill_ratio"] == 0.75
    assert numbers["ridgeline_mfu_ratio"] == 0.1 and numbers["ridgeline_mbu_ratio"] == 0.4
    assert numbers["ridgeline_queued_tokens"] == 70
    rejected = 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"}'
    assert numbers[rejected] == 5
    bucket = 'vllm:iteration_tokens_total_bucket{le="%s",model_name="fake"}'
    assert numbers[bucket % "8.0"] == 3 and numbers[bucket % "+Inf"] == 4
    assert numbers["vllm:prompt_tokens_cached_total"] == 3
    assert numbers["ridgeline_time_to_publish_seconds_count"] == 4
    spent = numbers["ridgeline_cost_spent"]
    per_million = numbers["ridgeline_cost_per_million_tokens"]
    assert 0 < spent < 60 and per_million == pytest.approx(spent / 4 * 1e6, rel=0.5)


async def test_no_utilisation_without_peaks_and_no_cost_without_a_price(
    http: httpx.AsyncClient,
) -> None:
    text = (await http.get("/metrics")).text
    assert not any(name in text for name in ("mfu", "mbu", "cost"))
