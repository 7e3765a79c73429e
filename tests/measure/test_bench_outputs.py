"""What a run is shown as: vLLM's console block, the HTML page, the Chrome trace, several runs."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.bench import run_bench, run_bench_series
from ridgeline.config.load import BenchOptions, BenchReport
from ridgeline.errors import BadInput
from ridgeline.measure.metrics.run_cost import prefill_share
from ridgeline.measure.metrics.summary import summarise
from ridgeline.measure.report.bench_page import RunSeries, bench_page
from ridgeline.measure.report.charts import SweepPoint
from ridgeline.measure.report.chrome_trace import chrome_trace
from ridgeline.records import MachineLoad, Slo
from ridgeline.workflows.bench.bench_series import (
    SeriesPlan,
    figures_of,
    parse_range,
    parse_rates,
)
from ridgeline.workflows.targets import RemoteServer
from tests.diagnose.mock_thread import mock_server

LOAD = "synthetic:input=8,output=4"


def test_one_run_in_every_form(tmp_path):
    paths = {name: tmp_path / name for name in ("output_json", "log", "html", "trace")}
    outputs = BenchReport(**paths, layout="vllm", price_per_hour=2.0)
    console = Console(record=True, width=120)
    options = BenchOptions(workload=LOAD, num_prompts=12, num_warmups=0, max_concurrency=4)
    with mock_server(ttft_s=0.01, itl_s=0.002) as url:
        assert run_bench(options, RemoteServer(url=url), outputs, console) == 0
    text = console.export_text()
    assert "============ Serving Benchmark Result ============" in text
    assert re.search(r"Successful requests: +12", text)
    assert re.search(r"P99 TTFT \(ms\): +\d", text) and "cost at $2/h" in text
    result = json.loads(paths["output_json"].read_text())
    assert result["ridgeline"]["cost"]["per_million_output"] > 0
    page = paths["html"].read_text()
    assert "<svg" in page and "http://" not in page.replace(url, "") and "<script" not in page
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    assert sum(event["name"] == "decode" for event in events) == 12


@pytest.mark.slow
def test_several_runs(tmp_path):
    options = BenchOptions(
        workload=LOAD, num_prompts=30, num_warmups=0, slo=Slo.parse("ttft:2000"), request_rate=50.0
    )
    console = Console(record=True, width=120)
    html = tmp_path / "page.html"
    with mock_server(ttft_s=0.005, itl_s=0.001) as url:
        server = RemoteServer(url=url)
        for many in (
            SeriesPlan(num_runs=2),
            SeriesPlan(rates=(40.0, 80.0)),
            SeriesPlan(search=(40.0, 80.0)),
        ):
            assert run_bench_series(options, server, many, BenchReport(html=html), console) == 0
    text = console.export_text()
    assert "over 2 runs" in text and text.count("knee") == 2
    assert "Latency against rate" in html.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions(), "needs an SLO"),
        (BenchOptions(slo=Slo.parse("ttft:9"), num_prompts=24), ">= 25; fix: --num-prompts 100"),
        (BenchOptions(slo=Slo.parse("ttft:9 attainment:100%")), "no number of requests"),
    ],
)
def test_goodput_search_needs_an_slo_it_can_verify(options, words):
    with pytest.raises(BadInput, match=words):
        run_bench_series(
            options, RemoteServer(url="http://h"), SeriesPlan(search=(1.0, 2.0)), BenchReport()
        )


def test_rates_and_ranges():
    assert parse_rates("1,2.5") == (1.0, 2.5)
    assert parse_range("1:8") == (1.0, 8.0)
    for bad in ("", "0", "a", "1,-2", "inf"):
        with pytest.raises(BadInput):
            parse_rates(bad)
    for bad in ("8:1", "3", "x:2"):
        with pytest.raises(BadInput):
            parse_range(bad)


def test_figures_missing_from_a_run_have_no_interval(request_trace, run_trace):
    found = [summarise(run_trace([request_trace()])), summarise(run_trace([]))]
    assert "ttft p50 (ms)" not in figures_of(found)


def test_the_page_escapes_what_came_from_outside(request_trace, run_trace):
    run = run_trace([request_trace(), request_trace(error="<b>no</b>")], target="<i>x</i>")
    summary = summarise(run, Slo.parse("ttft:100"))
    points = [SweepPoint(rate=float(r), summary=summary, holds=r < 2) for r in (1, 2, 3)]
    page = bench_page(
        run, summary, Slo.parse("ttft:100"), series=RunSeries(points=points, knee=1.0)
    )
    assert "<b>no" not in page and "<i>x" not in page and "&lt;b&gt;no" in page
    assert "knee 1/s" in page


def test_page_of_a_busy_machine_says_so_first(request_trace, run_trace):
    quiet = run_trace([request_trace()])
    load = MachineLoad(others_share=0.4, waited_share=0.4)
    busy = msgspec.structs.replace(quiet, machine_load=load)
    said = "The machine was busy: other work took 40% of the CPU"
    assert said in bench_page(busy, summarise(busy), None)
    assert "machine was busy" not in bench_page(quiet, summarise(quiet), None)


def test_chrome_trace_reuses_rows_of_finished_requests(request_trace, run_trace, step_stat):
    requests = [
        request_trace(id="a", sent_s=0.05, started_s=0.1),
        request_trace(id="b", scheduled_s=0.25, sent_s=0.25, token_s=(0.4, 0.5)),
        request_trace(id="c", scheduled_s=0.35, sent_s=0.35, token_s=(0.6, 0.7)),
    ]
    run = run_trace(requests, steps=[step_stat([(4, 0)])])
    events = chrome_trace(run)["traceEvents"]
    rows = {e["name"]: e["tid"] for e in events if e["name"] in "abc"}
    assert rows == {"a": 0, "b": 1, "c": 0}  # c begins when a has ended
    spans = {e["name"]: e["dur"] for e in events if "dur" in e and e["pid"] == 1 and e["tid"] == 0}
    assert spans["client queue"] == pytest.approx(5e4) and "queue" in spans
    assert any(e["name"].startswith("step") for e in events)
    assert prefill_share(run_trace([requests[1]])) == pytest.approx(0.15 / 0.25)


@pytest.mark.slow
def test_each_repeated_run_keeps_its_server_report(tmp_path):
    """One log per run, each diagnosed like a single run, with the server's metrics per rate."""
    from ridgeline.workflows.diagnose.diagnose import diagnose, read_recorded_run

    options = BenchOptions(workload=LOAD, num_prompts=30, num_warmups=0, request_rate=200.0)
    console = Console(record=True, width=120)
    folder = tmp_path / "runs"
    folder.mkdir()
    outputs = BenchReport(log=folder / "run.jsonl", output_json=tmp_path / "out.json")
    with mock_server(slots=1, ttft_s=0.02, itl_s=0.001) as url:
        server = RemoteServer(url=url, shape="dummy:tinyllama-1.1b", accelerator="h100-sxm")
        run_bench_series(options, server, SeriesPlan(rates=(20.0, 200.0)), outputs, console)
        slow, fast = sorted(folder.iterdir())
        output = json.loads((tmp_path / "out.json").read_text())
        run_bench_series(options, server, SeriesPlan(num_runs=2), outputs, Console(record=True))
    assert (slow.name, fast.name) == ("run-1.jsonl", "run-2.jsonl")
    run, context = read_recorded_run(fast)
    assert run.arrivals.startswith("poisson:200") and context.server.means["waiting"] > 1
    assert diagnose(BenchOptions(), fast).findings[0].cause == "too-few-slots"
    assert [each["log"] for each in output["ridgeline_runs"]] == [slow.name, fast.name]
    assert all(each["server"]["server"] == "vllm" for each in output["ridgeline_runs"])
    assert output["ridgeline_runs"][0]["use"]["mfu"] > 0
    text = console.export_text()
    for words in ("running", "waiting", "MFU", "lost to", "too-few-slots"):
        assert words in text, text
    again = json.loads((tmp_path / "out.json").read_text())
    spread = again["ridgeline_intervals"]["output tok/s"]
    assert spread["low"] < spread["mid"] < spread["high"] and again["ridgeline_sweep"] == []


def test_trimming_applies_to_sweeps_and_is_rejected_elsewhere(tmp_path):
    options = BenchOptions(
        workload=LOAD, num_prompts=60, num_warmups=0, request_rate=50.0, warmup_s=0.5
    )
    out = tmp_path / "out.json"
    with mock_server(ttft_s=0.005, itl_s=0.001) as url:
        run_bench_series(
            options,
            RemoteServer(url=url),
            SeriesPlan(rates=(60.0,)),
            BenchReport(output_json=out),
            Console(record=True),
        )
    assert json.loads(out.read_text())["completed"] == 60  # vLLM's keys: all that was sent
    whole = BenchOptions(slo=Slo.parse("ttft:9"), num_prompts=100, warmup_s=1.0)
    with pytest.raises(BadInput, match="--warmup-s has no effect with --find-goodput"):
        run_bench_series(
            whole, RemoteServer(url="http://h"), SeriesPlan(search=(1.0, 2.0)), BenchReport()
        )


def test_log_and_result_of_a_run_count_once(tmp_path):
    from ridgeline.workflows.compare_runs import read_results

    options = BenchOptions(workload=LOAD, num_prompts=5, num_warmups=0)
    with mock_server(ttft_s=0.002, itl_s=0.001) as url:
        for seed in (0, 1):
            chosen = msgspec.structs.replace(options, seed=seed)
            outputs = BenchReport(
                log=tmp_path / f"{seed}.jsonl", output_json=tmp_path / f"{seed}.json"
            )
            assert run_bench(chosen, RemoteServer(url=url), outputs, Console(record=True)) == 0
    assert [result.tool for result in read_results(tmp_path)] == ["ridgeline", "ridgeline"]
    (tmp_path / "1.jsonl").unlink()
    assert [result.tool for result in read_results(tmp_path)] == ["ridgeline", "vllm"]
