"""Metrics pages of all servers are read into one set of names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ridgeline.measure.client.http_connection import HttpConnectionError, HttpConnectionPool, Origin
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer
from ridgeline.measure.monitors.server_metrics import (
    ServerMonitor,
    identify_server,
    make_report,
    metric_names,
    parse_page,
)
from tests.measure.memory_transport import connect_to_mock

PAGES = {
    "vllm": 'vllm:num_requests_running{model_name="m"} 3\n',
    "ridgeline": 'vllm:num_requests_running 3\nridgeline_batch_fill_ratio{model_name="m"} 1\n',
    "sglang": "sglang:num_running_reqs 3\n",
    "tgi": "tgi_batch_current_size 3\n",
    "tensorrt-llm": "trtllm_kv_cache_utilization 0.5\n",
    "llama.cpp": "llamacpp:requests_processing 3\n",
}


@pytest.mark.parametrize("server", PAGES)
def test_each_server_is_recognised(server):
    sample = parse_page(PAGES[server])
    assert identify_server(sample) == server
    found = make_report([sample, sample])
    gauge, value = ("kv_used_share", 0.5) if server == "tensorrt-llm" else ("running", 3.0)
    assert found.means[gauge] == value


FOR_ALERTS = {"ttft_s", "tpot_s", "itl_s", "loop_lag_s", "finished_requests"}
"""Names that alerts alone use: their histograms are not read from pages."""


def test_all_metric_names_are_known():
    known = {"sign", "config", "running", "waiting", "kv_used_share", "hit_share", "preemptions"}
    known |= {"hit_tokens", "queried_tokens", "prompt_tokens", "output_tokens"}
    known |= {"queue_s", "prefill_s", "decode_s", "prefill_total_s", "decode_total_s"}
    known |= {"num_steps", "step_tokens", "slots", "waiting_total_s", "full_waiting_total_s"}
    known |= {"spent_waiting_total_s", "cpu_s", "rss_bytes"}
    for server, names in metric_names().items():
        assert set(names) <= known | FOR_ALERTS, server


REAL = {"vllm": "vllm-0.32.txt", "llama.cpp": "llama.cpp-0.5.0-dev.txt"}
GONE = {("llama.cpp", "kv_used_share")}


@pytest.mark.parametrize("server", REAL)
def test_every_name_is_on_the_page_of_a_running_server(server):
    """Pages as they were served after some load; only other people's histogram buckets left out."""
    page = Path(__file__).parent / "pages" / REAL[server]
    sample = parse_page(page.read_text(encoding="utf-8"))
    assert identify_server(sample) == server
    before = dict.fromkeys(sample, 0.0)
    found = make_report([before, sample])
    names = {*found.means, *found.counts, *found.mean_s}
    for name in FOR_ALERTS & metric_names()[server].keys():
        assert all(metric in page.read_text("utf-8") for metric in metric_names()[server][name])
    for name in metric_names()[server].keys() - {"sign", "config"} - FOR_ALERTS:
        assert (name in names) is ((server, name) not in GONE), name


def test_sum_of_counters_is_unknown_if_one_is_missing():
    page = Path(__file__).parent / "pages" / REAL["llama.cpp"]
    sample = parse_page(page.read_text(encoding="utf-8"))
    found = make_report([dict.fromkeys(sample, 0.0), sample])
    assert found.counts["queried_tokens"] == 3824 + 5367
    del sample["llamacpp:prompt_tokens_cached_total"]
    counts = make_report([dict.fromkeys(sample, 0.0), sample]).counts
    assert counts["prompt_tokens"] == 3824 and "queried_tokens" not in counts


def test_the_text_format():
    text = (
        "# HELP x y\n# TYPE x gauge\n"
        'x{a="1 {odd} value",b="2"} 1.5 1700000000\nx{a="3"} 2\ny 1e3\nz NaN\nbroken\n\n'
    )
    assert parse_page(text) == {"x": 3.5, "y": 1000.0}


def test_counters_are_differences_and_a_restart_makes_them_unknown():
    def page(queue_sum, count, hits):
        return parse_page(
            f"vllm:request_queue_time_seconds_sum {queue_sum}\n"
            f"vllm:request_queue_time_seconds_count {count}\n"
            f"vllm:prefix_cache_hits_total {hits}\n"
        )

    found = make_report([page(5.0, 10, 100), page(8.0, 16, 130)])
    assert found.mean_s["queue_s"] == pytest.approx(0.5)
    assert found.counts == {"hit_tokens": 30}
    assert make_report([page(5.0, 10, 100), page(1.0, 2, 3)]).counts == {}
    assert make_report([]) is None and make_report([{"other": 1.0}]) is None


def test_metrics_are_read_during_the_run(in_virtual_time):
    server = MockServer(MockPace(ttft_s=1.0, itl_s=1.0))
    body = b'{"model": "steady", "max_tokens": 5, "stream": true, "prompt": [1, 2, 3]}'

    async def main():
        connect = connect_to_mock(server)
        wire = HttpConnectionPool(Origin("mock", 1), {}, connect)
        async with ServerMonitor(wire, "/metrics") as scraper:
            asked = HttpConnectionPool(Origin("mock", 1), {}, connect)
            await asyncio.gather(
                *(asked.post("/v1/completions", body, lambda data: None) for _ in range(2))
            )
            await asyncio.sleep(0.1)
        return scraper.report()

    found = in_virtual_time(main())
    assert found.server == "vllm" and found.num_readings >= 10
    assert found.p95["running"] == 2.0
    assert found.counts == {"prompt_tokens": 6.0, "output_tokens": 10.0}


def test_a_server_without_a_page_is_none(in_virtual_time):
    async def refuse(origin, protocol):
        raise HttpConnectionError("refused")

    async def main():
        async with ServerMonitor(
            HttpConnectionPool(Origin("mock", 1), {}, refuse), "/metrics"
        ) as scraper:
            await asyncio.sleep(5)
        return scraper.report()

    assert in_virtual_time(main()) is None
