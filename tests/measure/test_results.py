"""Result files of every tool are read, and two of them are judged: gains, losses, and refusals."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.commands.measure.compare import EXIT_CODES
from ridgeline.cli.main import main
from ridgeline.cli.render.measure.compare import print_comparison
from ridgeline.errors import BadInput
from ridgeline.measure.results.comparison import compare_results, load_differences
from ridgeline.measure.results.event_log import write_run
from ridgeline.measure.results.readers import read_result
from ridgeline.measure.results.result_file import LoadedResult
from ridgeline.stats import percentile
from ridgeline.workflows.compare_runs import compare_runs, read_results

VLLM = {
    "num_prompts": 3,
    "completed": 2,
    "request_rate": "inf",
    "max_concurrency": 4,
    "total_input_tokens": 30,
    "request_throughput": 2.0,
    "output_throughput": 9.0,
    "request_goodput": 1.5,
    "mean_ttft_ms": 120.0,
    "median_ttft_ms": 110.0,
    "p99_ttft_ms": 200.0,
    "std_ttft_ms": 9.0,
    "p99_e2el_ms": 900.0,
    "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.02, 0.04], [], []],
    "output_lens": [3, 1, 0],
    "errors": ["", "", "gone"],
}
GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 95, "errored": 5, "total": 100},
                "time_to_first_token_ms": {
                    "successful": {"mean": 40.0, "median": 30.0, "percentiles": {"p99": 70.0}}
                },
                "time_per_output_token_ms": {"successful": {"median": 12.0}},
                "request_latency": {"successful": {"mean": 0.5, "p99": 1.0}},
                "output_tokens_per_second": {"successful": {"mean": 150.5}},
            }
        }
    ]
}
AIPERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 9.7},
    "request_count": {"unit": "requests", "avg": 30.0},
    "time_to_first_token": {"unit": "ms", "avg": 120.5, "p50": 110.0, "p99": 250.0, "std": 3.0},
    "inter_token_latency": {"unit": "ms", "avg": 12.0, "p99": 20.0},
    "request_latency": {"unit": "ms", "avg": 3200.0, "p50": 3100.0},
}
INFERENCE_PERF = {
    "load_summary": {"count": 10, "requested_rate": 4.0},
    "successes": {
        "latency": {
            "time_to_first_token": {"mean": 0.3, "median": 0.2, "p99": 0.9},
            "request_latency": {"mean": 1.5, "p99.9": 3.0},
        },
        "throughput": {"requests_per_sec": 0.9, "output_tokens_per_sec": 69.5},
    },
}
LLMPERF = {  # the keys of the files in its repository's benchmarks/results
    "version": "2023-08-31",
    "name": "m_550_150_summary",
    "mean_input_tokens": 550,
    "mean_output_tokens": 150,
    "results_num_requests_started": 80,
    "results_num_completed_requests_per_min": 120.0,
    "results_inter_token_latency_s_mean": 0.05,
    "num_concurrent_requests": 8,
    "results_ttft_s_mean": 0.4,
    "results_ttft_s_quantiles_p99": 0.9,
    "results_end_to_end_latency_s_quantiles_p50": 2.0,
    "results_mean_output_throughput_token_per_s": 77.0,
}
LLMPERF_ROWS = [
    {"error_code": None, "ttft_s": 0.1, "end_to_end_latency_s": 0.5},
    {"error_code": 500, "ttft_s": 0, "end_to_end_latency_s": 0},
]
AIPERF_ROWS = [
    {
        "metrics": {
            "time_to_first_token": {"value": 100.0, "unit": "ms"},
            "request_latency": {"value": 500.0, "unit": "ms"},
        },
        "error": None,
    },
    {"metrics": {}, "error": {"code": 500}},
]


@pytest.mark.parametrize(
    ("body", "tool", "figures"),
    [
        (VLLM, "vllm", {"ttft_p50": 0.11, "e2e_p99": 0.9, "goodput": 1.5, "output_tok_s": 9.0}),
        (GUIDELLM, "guidellm", {"ttft_p99": 0.07, "e2e_p99": 1.0, "tpot_incl_first_p50": 0.012}),
        (AIPERF, "aiperf", {"ttft_mean": 0.1205, "tpot_p99": 0.02, "request_rate": 9.7}),
        (INFERENCE_PERF, "inference-perf", {"ttft_p50": 0.2, "e2e_p99.9": 3.0}),
        (
            LLMPERF,
            "llmperf",
            {"ttft_p99": 0.9, "e2e_p50": 2.0, "output_tok_s": 77.0, "request_rate": 2.0},
        ),
    ],
)
def test_each_tools_summary(tmp_path, body, tool, figures):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(body, indent=2))
    found = read_result(path)
    assert found.tool == tool
    for name, value in figures.items():
        assert found.figures[name] == pytest.approx(value)
    assert not any(name.endswith("std") for name in found.figures)


def test_each_tools_requests(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM))
    vllm = read_result(path).samples
    assert vllm["ttft"] == (0.1, 0.2)
    assert vllm["tpot"] == pytest.approx((0.03,))  # a one-token answer has none
    assert vllm["e2e"] == pytest.approx((0.16, 0.2))
    path.write_text(json.dumps(LLMPERF_ROWS))
    assert read_result(path).samples == {"ttft": (0.1,), "e2e": (0.5,)}
    path.write_text("\n".join(map(json.dumps, AIPERF_ROWS)))
    assert read_result(path).samples["e2e"] == (0.5,)


OTHERS = Path(__file__).parent / "other_tools"
SCRIPT = {"ttft": 0.1, "tpot": 0.02, "e2e": 0.16}  # `mock-server`'s "plain", which they measured


@pytest.mark.parametrize("path", sorted(OTHERS.iterdir()), ids=lambda path: path.name)
def test_files_of_running_releases(path):
    """Written by the tools themselves, 12 requests each; only hosts and bulk were taken out."""
    found = read_result(path)
    assert path.name.startswith(found.tool)
    assert found.load["num_requests"] == 12
    figures = {**found.figures, **{f"{k}_p50": percentile(v, 50) for k, v in found.samples.items()}}
    recounts = found.tool == "inference-perf" and not found.samples  # the script's text, as it must
    for metric, truth in SCRIPT.items():
        if recounts and metric == "tpot":
            truth *= 3 / 4  # to its tokenizer the four tokens are five
        assert figures[f"{metric}_p50"] == pytest.approx(truth, rel=0.12), metric
    if "request_rate" in found.figures:
        assert 3.9 < found.figures["request_rate"] < 13
    # From its requests against its own summary; GuideLLM's latency goes on to the usage chunk.
    for metric, values in found.samples.items():
        assert len(values) == 12
        if f"{metric}_mean" in found.figures:
            assert statistics.fmean(values) == pytest.approx(found.figures[f"{metric}_mean"], 5e-3)


def test_three_files_of_one_run_agree():
    lines, whole, table = (
        read_result(OTHERS / f"aiperf-0.13.0.{s}") for s in ("jsonl", "json", "csv")
    )
    assert whole.figures.keys() == table.figures.keys()
    for name, value in whole.figures.items():
        assert table.figures[name] == pytest.approx(value, abs=6e-6, rel=2e-3), name
    for metric, values in lines.samples.items():
        assert statistics.fmean(values) == pytest.approx(whole.figures[f"{metric}_mean"], 1e-4)


def test_a_folder_that_aiperf_wrote_is_one_run(tmp_path):
    """What else lies there is no result: its inputs, a hidden marker, the same run's summary."""
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        for end, named in (
            ("jsonl", "profile_export.jsonl"),
            ("json", "profile_export_aiperf.json"),
        ):
            (folder / named).write_bytes((OTHERS / f"aiperf-0.13.0.{end}").read_bytes())
        (folder / "inputs.json").write_text('{"data": []}')
        (folder / ".aiperf_results_ready.json").write_text("{}")
    (one,) = read_results(tmp_path / "one")
    assert one.samples == read_result(OTHERS / "aiperf-0.13.0.jsonl").samples
    (tmp_path / ".hidden.json").write_text("{}")
    assert [result.samples for result in read_results(tmp_path)] == [one.samples] * 2


def test_inference_perfs_requests_agree_with_its_summary():
    whole, requests = (
        read_result(OTHERS / f"inference-perf-0.7.0{end}.json") for end in ("", "-requests")
    )
    for metric in ("ttft", "e2e"):  # its latency goes on to the end of the stream
        mean = statistics.fmean(requests.samples[metric])
        assert mean == pytest.approx(whole.figures[f"{metric}_mean"], rel=0.2, abs=0.005)
    assert load_differences([whole], [requests]) == ()


def test_a_failed_request_of_inference_perf_has_no_latency(tmp_path):
    rows = json.loads((OTHERS / "inference-perf-0.7.0-requests.json").read_text())
    rows[0]["error"] = {"error_type": "HTTPError", "error_msg": "500"}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(rows))
    found = read_result(path)
    assert found.load["num_requests"] == 12 and {len(v) for v in found.samples.values()} == {11}


def test_guidellm_percentile_names_get_their_decimal_point():
    figures = read_result(OTHERS / "guidellm-0.8.1.json").figures
    assert {"ttft_p0.1", "ttft_p1", "ttft_p5", "ttft_p99.9"} <= figures.keys()
    assert not {"ttft_p001", "ttft_p01", "ttft_p999"} & figures.keys()


def test_our_event_log(tmp_path, request_trace, run_trace):
    path = tmp_path / "run.jsonl"
    write_run(run_trace([request_trace(id="a"), request_trace(id="b", error="no")]), path)
    found = read_result(path)
    assert (found.tool, found.ids) == ("ridgeline", ("a",))
    assert found.samples["ttft"] == (0.2,)
    assert found.load["num_requests"] == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", "hello", '{"a": 1}\n{"a": 2}'])
def test_other_files_are_not_read_as_results(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    if text == "[]":
        return  # an llmperf run without requests
    with pytest.raises(BadInput, match="not a known result file"):
        read_result(path)


def side(factor=1.0, seed=0, count=200, noise=0.2, load=None, walk=0.0, ids=()):
    rng = random.Random(seed)
    values = tuple(
        factor * (1 + walk * i / count) * rng.lognormvariate(0, noise) for i in range(count)
    )
    return LoadedResult(source="x", tool="t", samples={"ttft": values}, load=load or {}, ids=ids)


def of(judgements, name):
    return next(judgement for judgement in judgements if judgement.metric == name)


@pytest.mark.parametrize(("factor", "outcome"), [(0.7, "improved"), (1.4, "regressed")])
def test_a_change_is_seen(factor, outcome):
    found = of(compare_results([side(seed=1)], [side(factor, seed=2)]), "ttft_mean")
    assert found.outcome == outcome and found.p_value < 0.05
    assert found.low < factor * 1.06 and found.high > factor * 0.94
    assert outcome in str(found) and "→" in str(found)


def test_noise_is_inconclusive_and_no_change_is_unchanged():
    quiet = [side(seed=s, noise=0.02) for s in (1, 2)]
    assert of(compare_results(quiet[:1], quiet[1:]), "ttft_p50").outcome == "unchanged"
    loud = [side(seed=s, noise=1.0) for s in (1, 2)]
    found = of(compare_results(loud[:1], loud[1:]), "ttft_p99")
    assert found.outcome == "inconclusive" and "noisy" in found.reason


@pytest.mark.slow
def test_false_alarm_rate_is_at_most_the_level():
    """Equal sides, 60 times: at 95 % some three are expected."""
    alarms = 0
    for seed in range(60):
        pair = compare_results(
            [side(seed=2 * seed, noise=0.1)], [side(seed=2 * seed + 1, noise=0.1)]
        )
        alarms += of(pair, "ttft_mean").outcome in ("improved", "regressed")
    assert alarms <= 8


def test_pairing_detects_changes_below_the_request_spread():
    ids = tuple(map(str, range(200)))
    a = side(seed=1, noise=1.0, ids=ids)
    b = msgspec.structs.replace(a, samples={"ttft": tuple(1.05 * v for v in a.samples["ttft"])})
    assert of(compare_results([a], [b]), "ttft_mean").outcome == "regressed"
    loose = msgspec.structs.replace(b, ids=())
    assert of(compare_results([a], [loose]), "ttft_mean").outcome == "inconclusive"


def test_drift_inside_a_run_is_refused():
    found = of(compare_results([side(seed=1)], [side(1.15, seed=2, walk=1.5)]), "ttft_mean")
    assert found.outcome in ("inconclusive", "regressed")
    drifting = compare_results([side(seed=1, walk=2.0)], [side(1.2, seed=2, walk=2.0)])
    assert "drift" in of(drifting, "ttft_mean").reason


def test_repeated_runs_are_the_observations():
    """Requests agree with each other within a run; runs do not: the interval must know."""
    rng = random.Random(5)
    factors = [rng.lognormvariate(0, 0.2) for _ in range(8)]
    a = [side(f, seed=i, noise=0.01) for i, f in enumerate(factors[:4])]
    b = [side(f, seed=9 + i, noise=0.01) for i, f in enumerate(factors[4:])]
    found = of(compare_results(a, b), "ttft_mean")
    logs = [statistics.fmean(r.samples["ttft"]) for r in (*a, *b)]
    assert found.low < 1 < found.high and max(logs) / min(logs) > 1.2
    assert found.outcome != "improved"
    uneven = of(compare_results(a, b[:3]), "ttft_mean")
    assert uneven.low < uneven.ratio < uneven.high


def test_summaries_alone_are_inconclusive():
    a = LoadedResult(source="a", tool="vllm", figures={"ttft_p50": 0.1})
    b = LoadedResult(source="b", tool="vllm", figures={"ttft_p50": 0.05})
    (found,) = compare_results([a], [b])
    assert found.outcome == "inconclusive" and "without samples per request" in str(found)


def test_results_of_different_loads_are_not_compared():
    a, b = side(load={"workload": "chat", "num_requests": 100}), side(load={"workload": "code"})
    assert "workload chat and code" in load_differences([a], [b])[0]
    near = side(load={"num_requests": 101})
    assert load_differences([side(load={"num_requests": 100})], [near]) == ()
    bad = LoadedResult(source="b", tool="t", invalid=("the client was slow",))
    assert load_differences([a], [bad]) == ("b: the client was slow",)


def test_the_commands_exit_code(tmp_path, request_trace, run_trace, capsys):
    def log(name, factor, seed, workload="w"):
        rng = random.Random(seed)
        requests = []
        for i in range(60):
            ttft = factor * 0.2 * rng.lognormvariate(0, 0.05)
            requests.append(
                request_trace(id=str(i), scheduled_s=0.1 * i, token_s=(0.1 * i + ttft, 0.1 * i + 2))
            )
        path = tmp_path / name
        write_run(run_trace(requests, workload=workload), path)
        return path

    a, worse = log("a.jsonl", 1.0, 1), log("b.jsonl", 2.0, 2)
    assert main(["compare", str(a), str(worse)]) == 1
    assert main(["compare", str(a), str(a)]) == 0
    assert main(["compare", str(a), str(log("c.jsonl", 1.0, 1, "other"))]) == 3
    capsys.readouterr()
    assert main(["compare", str(a), str(worse), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["exit_code"] == 1 and output["judgements"]


def test_a_flag_without_effect_is_found(tmp_path, request_trace, run_trace):
    from rich.console import Console

    from ridgeline.records import EngineInfo

    def log(name, slots):
        requests = [
            request_trace(id=str(i), scheduled_s=i, token_s=(i + 0.2, i + 0.3)) for i in range(40)
        ]
        info = EngineInfo(
            model="m", settings={"max_num_seqs": slots}, derivations={}, max_model_len=1,
            num_blocks=1, block_size=1, weight_bytes=1, kv_bytes_per_token=1, device="cpu",
            compute_dtype="float32",
        )  # fmt: skip
        path = tmp_path / name
        write_run(run_trace(requests, info=info), path)
        return path

    console = Console(record=True, width=200)
    comparison = compare_runs(log("a.jsonl", 4), log("b.jsonl", 8))
    assert EXIT_CODES[comparison.conclusion] == 0
    print_comparison(comparison, console)
    assert "no effect: max_num_seqs 4 → 8" in console.export_text()
