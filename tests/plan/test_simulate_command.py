"""`ridgeline simulate` from a load to numbers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.measure.metrics.goodput import meets
from ridgeline.plan.simulate.records import FleetOutcome, RequestOutcome, SimulatedRequest
from ridgeline.plan.simulate.summary import FleetSummary, summarise, traces
from ridgeline.records import Slo
from ridgeline.workflows.planning.simulate import _length_note

COMMAND = ["simulate", "llama-3.1-8b", "--accelerator", "h100-sxm"]
SMALL = [
    *COMMAND,
    "--request-rate",
    "30",
    "--num-prompts",
    "200",
    "--input-len",
    "300",
    "--output-len",
    "40",
]


def simulated(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, float]:
    assert main([*SMALL, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_seed_determines_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulated(capsys, "--seed", "4", "--slo", "ttft:300 tpot:20")
    assert first == simulated(capsys, "--seed", "4", "--slo", "ttft:300 tpot:20")
    assert first != simulated(capsys, "--seed", "5", "--slo", "ttft:300 tpot:20")
    assert first["num_served"] == 200 and first["attainment"] > 0.9


def test_fast_forward_does_not_change_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = simulated(capsys), simulated(capsys, "--step-by-step")
    assert fast["num_steps"] == slow["num_steps"]
    assert fast["duration_s"] == pytest.approx(slow["duration_s"], rel=1e-9)
    assert fast["ttft"] == pytest.approx(slow["ttft"], rel=1e-6)


def test_more_replicas_reduce_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    one, four = simulated(capsys), simulated(capsys, "--replicas", "4")
    assert four["tpot"]["mean"] < one["tpot"]["mean"]  # type: ignore[index]
    assert four["device_hours"] == pytest.approx(4 * four["duration_s"] / 3600)


@pytest.mark.parametrize("model", ["own", "further"])
def test_requests_beyond_the_context_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[[model]]\nmodel = "llama-3.2-1b"\nrate = 1.0\nisl = 131072\n')
    is_own = model == "own"
    words = ["--input-len", "131072"] if is_own else ["--further-models", str(path)]
    assert main([*SMALL, *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "longer than the context" in error and "131,072 tokens" in error


def test_decode_replicas_are_part_of_the_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    split = simulated(capsys, "--replicas", "3", "--decode-replicas", "1")
    assert split["most_replicas"] == 3
    assert split["device_hours"] == pytest.approx(3 * split["duration_s"] / 3600)
    assert main([*SMALL, "--replicas", "2", "--decode-replicas", "2"]) == 2
    assert "--replicas 3" in capsys.readouterr().err


def test_recorded_workload_writes_page_and_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 50 * i, "input_length": 1500, "output_length": 8, "hash_ids": [i % 3, 99, i]}
        for i in range(60)
    ]
    recorded = tmp_path / "trace.jsonl"
    recorded.write_text("\n".join(map(json.dumps, lines)))
    page, chrome = tmp_path / "page.html", tmp_path / "trace.json"
    asked = [
        *COMMAND,
        "--workload",
        f"mooncake:{recorded}",
        "--replay-speed",
        "2",
        "--replicas",
        "2",
    ]
    asked += ["--enable-prefix-caching", "--router", "prefix-aware"]
    assert main([*asked, "--html", str(page), "--trace", str(chrome), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_share"] > 0.4 and 1.4 < found["duration_s"] < 2.0
    assert "<svg" in page.read_text()
    assert len(json.loads(chrome.read_text())["traceEvents"]) > 100
    assert main(asked) == 0
    assert "prefix hits" in capsys.readouterr().out


def test_page_covers_all_requests_although_traces_are_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures count all requests, although trace and timeline show a sample; inter-token gaps are
    omitted, because the simulator does not record token times."""
    monkeypatch.setattr("ridgeline.workflows.planning.simulate.MAX_TRACED_REQUESTS", 40)
    page, chrome = tmp_path / "page.html", tmp_path / "trace.json"
    assert main([*SMALL, "--num-prompts", "450", "--html", str(page), "--trace", str(chrome)]) == 0
    capsys.readouterr()
    text = page.read_text()
    assert "450 requests served" in text and "One request in 3 is shown." in text
    assert "time per output token" in text and "inter-token" not in text
    events = json.loads(chrome.read_text())["traceEvents"]
    assert sum("outcome" in event["args"] for event in events) in range(36, 41)


def test_invalid_simulations_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--router", "best", "--num-prompts", "2"]) == 2
    assert "prefix-aware" in capsys.readouterr().err
    assert main([*COMMAND, "--replay-speed", "2"]) == 2
    assert main([*COMMAND, "--request-rate", "0"]) == 2
    assert main(["simulate", "llama-3.1-70b", "--accelerator", "h100-sxm"]) == 2
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--input-len", "0"),
        ("--output-len", "-1"),
        ("--num-prompts", "100000000000"),
        ("--num-prompts", "0"),
        ("--replicas", "100000000000"),
        ("--replicas", "-1"),
        ("--decode-replicas", "-1"),
        ("--autoscale", "100000000000"),
        ("--batch-share", "7"),
        ("--batch-share", "nan"),
        ("--target-in-flight", "0"),
        ("--startup-s", "-1"),
        ("--mtbf-s", "1e-300"),
        ("--repair-s", "inf"),
        ("--accelerator", "h100-sxm=100000000000"),
    ],
)
def test_out_of_range_options_name_the_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_summary_by_hand() -> None:
    asked = SimulatedRequest(at_s=1.0, num_prompt=10, num_output=5)
    good = RequestOutcome(asked, started_s=1.5, first_s=2.0, finished_s=4.0)
    lost = RequestOutcome(asked, error="lost")
    outcome = FleetOutcome(
        requests=(good, lost),
        replicas=(),
        duration_s=8.0,
        area=12.0,
        num_steps=3,
        num_events=3,
        num_replicas=((0.0, 2),),
    )
    found = summarise(outcome, Slo(ttft_s=1.0, tpot_s=0.5))
    assert found.ttft is not None and found.tpot is not None and found.queue is not None
    assert (found.ttft.p50, found.tpot.p50, found.queue.p50) == (1.0, 0.5, 0.5)
    assert (found.attainment, found.goodput_req_s, found.mean_in_flight) == (0.5, 1 / 8, 1.5)
    assert summarise(outcome, Slo(ttft_s=0.9)).attainment == 0.0


@pytest.mark.parametrize("limits", ["tpot:50", "ttft:1500 tpot:50", "ttft:900 tpot:50", "e2e:9"])
@pytest.mark.parametrize("num_output", [1, 5])
def test_simulated_requests_meet_the_slo_like_measured_ones(num_output: int, limits: str) -> None:
    """A one-token answer has no TPOT: only the other limits apply.

    Without any, it misses the SLO.
    """
    asked = SimulatedRequest(at_s=1.0, num_prompt=10, num_output=num_output)
    outcome_of_request = RequestOutcome(
        asked, started_s=1.5, first_s=2.0, finished_s=2.0 if num_output == 1 else 2.1
    )
    outcome = FleetOutcome(
        requests=(outcome_of_request,),
        replicas=(),
        duration_s=8.0,
        area=1.0,
        num_steps=1,
        num_events=1,
        num_replicas=((0.0, 1),),
    )
    slo = Slo.parse(limits)
    (trace,) = traces(outcome, 1)
    assert (summarise(outcome, slo).attainment == 1.0) == meets(trace, slo)
    if num_output == 1 and limits == "tpot:50":
        assert not meets(trace, slo)


@pytest.mark.slow
def test_several_seeds_give_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--num-seeds", "5", "--slo", "ttft:300 tpot:20")
    figures: dict[str, dict[str, float]] = found["figures"]  # type: ignore[assignment]
    for figure in figures.values():
        assert figure["low"] <= figure["mid"] <= figure["high"]
    alone = [simulated(capsys, "--seed", str(n))["ttft"]["p99"] for n in range(5)]  # type: ignore[index]
    assert figures["ttft_p99_s"]["mid"] == pytest.approx(sorted(alone)[2])
    assert figures["ttft_p99_s"]["low"] < figures["ttft_p99_s"]["high"]
    assert main([*SMALL, "--num-seeds", "5"]) == 0
    assert "ttft p99 ms" in capsys.readouterr().out
    assert main([*SMALL, "--num-seeds", "2"]) == 2
    assert main([*SMALL, "--num-seeds", "1000000000000"]) == 2
    assert main([*SMALL, "--num-seeds", "5", "--html", "x.html"]) == 2


def test_fleet_of_several_kinds_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind by its own step times; least-loaded gives the faster one more."""
    asked = [
        "simulate",
        "llama-3.1-8b",
        "--request-rate",
        "60",
        "--num-prompts",
        "300",
        "--input-len",
        "300",
    ]
    assert main([*asked, "--accelerator", "h100-sxm=1,l40s=2"]) == 0
    shown = capsys.readouterr().out
    served = {
        name: int(line.split()[1])
        for line in shown.splitlines()
        for name in ("h100-sxm", "l40s")
        if line.strip().startswith(name) and "served" in line
    }
    assert sum(served.values()) == 300 and served["h100-sxm"] > served["l40s"] / 2
    assert main([*asked, "--accelerator", "h100-sxm=2", "--replicas", "2"]) == 2
    assert "--accelerator" in capsys.readouterr().err


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batching_policy_is_simulated_step_by_step_or_not(
    capsys: pytest.CaptureFixture[str], batching: str
) -> None:
    slots = ["--max-num-seqs", "16", "--batching", batching]
    waits, steps = simulated(capsys, *slots), simulated(capsys, *slots, "--step-by-step")
    assert waits["duration_s"] == pytest.approx(steps["duration_s"], rel=1e-9)
    assert waits["num_steps"] == steps["num_steps"]
    continuous = simulated(capsys, "--max-num-seqs", "16")
    assert waits["ttft"]["mean"] > 1.5 * continuous["ttft"]["mean"]  # type: ignore[index]


def test_longer_batch_wait_delays_first_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--request-rate", "2", "--num-prompts", "40", "--batching", "dynamic"]
    short, long = (simulated(capsys, *slow, "--batch-wait-ms", ms) for ms in ("1", "300"))
    assert long["ttft"]["p50"] > short["ttft"]["p50"] + 0.2  # type: ignore[index]


def test_derived_wait_fills_batches_and_keeps_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--request-rate", "4", "--num-prompts", "60", "--output-len", "1"]
    load += ["--slo", "ttft:1000", "--batching", "dynamic"]
    derived = simulated(capsys, *load)
    brief = simulated(capsys, *load, "--batch-wait-ms", "10")
    assert derived["num_steps"] < 0.7 * brief["num_steps"], "fuller batches"  # type: ignore[operator]
    assert derived["ttft"]["p95"] <= 1.0  # type: ignore[index]
    assert derived["ttft"]["p50"] > brief["ttft"]["p50"]  # type: ignore[index]
    without = simulated(capsys, *load[:6], "--batching", "dynamic")
    assert without["ttft"] == brief["ttft"], "without an SLO the wait is 10 ms"


def test_throttle_refuses_requests_and_shortens_the_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["--request-rate", "60", "--num-prompts", "1500", "--max-num-seqs", "8"]
    slo = ["--slo", "ttft:1000"]
    free = simulated(capsys, *load, *slo)
    throttled = simulated(capsys, *load, *slo, "--slo-throttle")
    assert free["num_served"] == 1500 > throttled["num_served"] > 32
    assert throttled["ttft"]["p95"] < 0.1 * free["ttft"]["p95"]  # type: ignore[index]


def test_throttle_without_an_objective_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--slo-throttle"]) == 2
    assert "--slo" in capsys.readouterr().err
    split = ["--replicas", "3", "--decode-replicas", "1", "--slo", "ttft:100", "--slo-throttle"]
    assert main([*SMALL, *split]) == 2
    assert "--decode-replicas" in capsys.readouterr().err


@pytest.mark.parametrize(("num_requests", "noted"), [(1_000, True), (10_000, False)])
def test_a_short_run_says_that_its_percentiles_vary(num_requests: int, noted: bool) -> None:
    """So that the p95 of `plan`, which is of a load that lasts, is not taken for another answer."""
    summary = msgspec.convert(
        {
            **dict.fromkeys(FleetSummary.__struct_fields__, 0),
            **dict.fromkeys(("ttft", "tpot", "e2e", "queue", "batch"), None),
            "tier_share": {}, "models": {}, "num_requests": num_requests, "mean_in_flight": 48.4,
        },
        FleetSummary,
    )  # fmt: skip
    notes = [note for note in _length_note(summary) if "--num-prompts 10000" in note]
    assert bool(notes) == noted
