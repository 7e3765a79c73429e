"""`ridgeline bench`: options, the result under vLLM's keys, the tables, and the command end to
end.
"""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.bench import run_bench as bench_command
from ridgeline.cli.render.measure.bench import bench_tables
from ridgeline.config.load import METRICS, BenchOptions, BenchReport
from ridgeline.config.sources import section_from
from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.measure.bench_options import (
    arrivals_of,
    check_options,
    load_options,
    run_bench,
    workload_of,
)
from ridgeline.measure.metrics.summary import summarise
from ridgeline.measure.results.event_log import RunContext, read_run
from ridgeline.measure.results.vllm_result import vllm_result
from ridgeline.records import Slo
from ridgeline.roofline import Peaks, Work
from ridgeline.workflows.bench.bench import BenchResult, bench_diagnosis, with_roofline
from ridgeline.workflows.load.server_monitor import Observed
from ridgeline.workflows.targets import ModelOnDevice, RemoteServer
from tests.measure.sse_server import SseServer

VLLM_KEYS = {
    "date",
    "backend",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
    "endpoint_type",
    "label",
    "latencies",
    "start_times",
    "queue_times",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
}  # of `vllm bench serve --save-detailed` 0.32; without `rtfx`, which is of audio


def test_flags_become_workload_arrivals_and_load():
    options = BenchOptions(request_rate=4.0, burstiness=0.5, max_concurrency=8, num_prompts=7)
    assert arrivals_of(options).label == "gamma:4.0:0.5"
    assert (load_options(options).max_concurrency, load_options(options).num_requests) == (8, 7)
    closed = BenchOptions(max_concurrency=8)
    assert arrivals_of(closed).label == "closed:8"
    assert load_options(closed).max_concurrency is None  # the process itself is the cap
    random = BenchOptions(input_len=64, output_len=16, prefix_len=8)
    assert workload_of(random).name == "synthetic:input=64,output=16,prefix=8"
    assert workload_of(BenchOptions(input_len=64)).name == "synthetic:input=64,output=128"
    assert workload_of(BenchOptions()).name == "chat-and-code"


def test_all_metrics_may_be_reported_by_one_word() -> None:
    assert BenchOptions(percentile_metrics="all").metrics == METRICS
    assert BenchOptions(percentile_metrics="ttft, e2el").metrics == ("ttft", "e2e")


@pytest.mark.parametrize(
    "wrong",
    [
        {"slo": "ttft"},
        {"slo": "ttft:abc"},
        {"percentile_metrics": "ttft,latency"},
        {"metric_percentiles": "50,101"},
        {"metric_percentiles": "p50"},
        {"workload": "chatty"},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"burstiness": -1.0, "request_rate": 1.0},
        {"max_concurrency": 0},
        {"num_prompts": 0},
        {"input_len": 0},
        {"timeout_s": -1.0},
    ],
)
def test_invalid_options_are_rejected_before_loading(wrong):
    with pytest.raises(BadInput):
        check_options(section_from(BenchOptions, wrong))


@pytest.fixture
def run(in_virtual_time, scripted):
    async def main():
        options = BenchOptions(input_len=8, output_len=3, num_prompts=6, max_concurrency=2)
        return await run_bench(scripted(), options)

    return in_virtual_time(main())


def test_ignore_eos_is_passed_on(in_virtual_time, scripted):
    async def main():
        target = scripted()
        options = BenchOptions(num_prompts=2, num_warmups=0, ignore_eos=False)
        return target, await run_bench(target, options)

    target, run = in_virtual_time(main())
    assert not any(request.ignore_eos for request in target.served)
    assert run.workload == "chat-and-code (stops early)"


def test_result_has_vllms_keys_with_their_meaning(run):
    found = vllm_result(run, summarise(run), percentiles=(50, 99.9))
    for name in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", "p50", "p99.9"):
            assert f"{figure}_{name}_ms" in found
    assert set(found) >= VLLM_KEYS
    assert (found["completed"], found["failed"], found["num_prompts"]) == (6, 0, 6)
    assert (found["request_rate"], found["max_concurrency"]) == ("inf", 2)
    assert found["mean_ttft_ms"] == pytest.approx(100.0)
    assert found["mean_tpot_ms"] == pytest.approx(10.0)
    assert found["mean_e2el_ms"] == pytest.approx(120.0)
    assert found["total_output_tokens"] == 18
    assert found["max_output_tokens_per_s"] == 18.0  # all within the first second
    assert found["latencies"] == pytest.approx([0.12] * 6) and found["start_times"][0] < 1e-6
    assert found["output_throughput"] == pytest.approx(18 / run.duration_s)
    json.dumps(found, allow_nan=False)


def test_vllms_latencies_count_from_the_send(in_virtual_time, scripted):
    async def main():
        options = BenchOptions(
            output_len=3,
            num_prompts=8,
            request_rate=1000.0,
            max_concurrency=1,
            num_warmups=0,
        )
        return await run_bench(scripted(), options)

    run = in_virtual_time(main())
    found = vllm_result(run, summarise(run))
    assert found["mean_e2el_ms"] == pytest.approx(120.0)
    assert found["ridgeline"]["p99_e2e_ms"] > 800
    assert (found["request_rate"], found["max_concurrency"]) == (1000.0, 1)


def result_of(run, options, device=None):
    result = BenchResult(
        options=options,
        run=run,
        summary=summarise(run, options.slo),
        observed=Observed(),
        context=RunContext(),
        diagnosis=bench_diagnosis(run, options, device, RunContext()),
        in_process=True,
    )
    return result if device is None else with_roofline(result, device)


def shown(run, options, device=None):
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(bench_tables(result_of(run, options, device)))
    return console.export_text()


def test_tables_show_figures_bounds_and_errors(request_trace, run_trace, step_stat):
    requests = [
        request_trace(kind="chat", sent_s=0.1),
        request_trace(kind="code", token_s=(0.2,)),
        request_trace(error="HTTP 503: full", token_s=()),
        request_trace(error="timeout: late", token_s=()),
    ]
    steps = [step_stat([(10, 0)]), step_stat([(1, 10)])]
    run = run_trace(requests, steps=steps, duration_s=1.0, client_cpu_share=0.99)
    peaks = Peaks(flops_s=1e9, bytes_s=1e9, dtype="float32", source="probe")
    device = ModelOnDevice(price=lambda shapes, n: Work(2e6, 5e6), peaks=peaks, name="here")
    options = BenchOptions(slo=Slo.parse("ttft:250"), metric_percentiles="50,99.9")
    text = shown(run, options, device)
    for part in (
        "p99.9",
        "5.00",  # the bound of TPOT: 5 MB at 1 GB/s
        "… from the send",
        "attainment 50%",
        "2 ok, 1 failed, 1 timed out",
        "chat",
        "decode MFU, MBU",
        "20.0%, 50.0%",
        "1 x HTTP 503: full",
        "invalid: the load client used 99% of a core",
    ):
        assert part in text, part
    assert "-bound" in result_of(run, options, device).diagnosis


def test_run_without_success_has_no_diagnosis(request_trace, run_trace):
    run = run_trace([request_trace(error="HTTP 500", token_s=())])
    assert "No request succeeded" in result_of(run, BenchOptions()).diagnosis
    assert "1 x HTTP 500" in shown(run, BenchOptions())


@pytest.fixture
def server():
    """The scripted server in a separate thread, because the command runs its own event loop."""
    with SseServer.in_thread() as running:
        yield running


def bench(server, tmp_path, **options):
    console = Console(width=120, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    outputs = BenchReport(output_json=tmp_path / "result.json", log=tmp_path / "run.jsonl")
    asked = BenchOptions(num_prompts=4, max_concurrency=2, num_warmups=1, **options)
    with console.file:
        code = bench_command(asked, RemoteServer(url=server.url), outputs, console)
    return code, console.export_text()


@pytest.mark.slow
def test_the_command_measures_prints_and_writes(server, tmp_path):
    code, text = bench(server, tmp_path, slo=Slo.parse("ttft:20000"), output_len=3)
    assert code == 0
    assert "4 ok" in text
    assert "attainment 100%" in text
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (4, 12)
    assert len(read_run(tmp_path / "run.jsonl").requests) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "result.json", "run.jsonl"]


def test_missing_output_folder_is_found_before_the_run(server, tmp_path):
    asked = BenchOptions(num_prompts=1)
    with pytest.raises(BadInput, match="no such folder"):
        outputs = BenchReport(output_json=tmp_path / "no" / "r.json")
        bench_command(asked, RemoteServer(url=server.url), outputs)
    assert server.num_requests == 0


def test_server_that_rejects_all_requests_is_reported_before_the_run(server, tmp_path):
    server.refuse = True
    with pytest.raises(EngineUnavailable, match="HTTP 503: full"):
        bench(server, tmp_path)
