"""`ridgeline watch`: live traffic read from metrics, tests of drift, and what would gain now."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import yaml
from starlette.testclient import TestClient

from ridgeline.cli.main import main
from ridgeline.config.load import WatchOptions
from ridgeline.config.server import ServerOptions, TwinServerOptions
from ridgeline.config.settings import Settings
from ridgeline.diagnose.drift import DriftCheck, drift, load_check
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.monitors.traffic import TrafficReading, read_page, traffic_between
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.comparison.objective import judge_run
from ridgeline.optimize.ranking.predictor import PredictorState
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search_state import SavedConfiguration, SavedSearch
from ridgeline.optimize.time_budget import BudgetState
from ridgeline.records import EngineInfo, Slo
from ridgeline.records.traffic import LengthProfile, TrafficProfile
from ridgeline.twin.servers.command_line import read_command
from ridgeline.workflows.optimize import watch as workflow
from ridgeline.workflows.optimize.watch import watch, workload_of
from ridgeline.workflows.optimize.watch_cronjob import cronjob
from ridgeline.workflows.serving.twin_of_server import open_twin
from tests.hardware.test_hardware_doctor import MACHINE
from tests.optimize.simulated_servers import Fake
from tests.optimize.test_search import only, search_ladder
from tests.optimize.test_twin_rehearsal import KNEE, MODEL, load_at, seen_by_clients

RUNG = "batch-limit"
Requests = Sequence[tuple[int, int]]
"""(prompt tokens, output tokens) of each."""


def lengths(mean: int, number: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [max(1, round(rng.lognormvariate(0, 0.4) * mean)) for _ in range(number)]


def profile(prompt: int = 300, output: int = 60, shared: float = 0.5) -> TrafficProfile:
    return TrafficProfile(
        num_requests=256,
        prompt=LengthProfile.of(tuple(lengths(prompt, 256))),
        output=LengthProfile.of(tuple(lengths(output, 256))),
        shared_share=shared,
    )


def page(requests: Requests, shared: float) -> str:
    """A page of vLLM's metrics after these requests."""
    lines = []
    for name, place in (("request_prompt_tokens", 0), ("request_generation_tokens", 1)):
        values = [request[place] for request in requests]
        for bound in (10, 100, 200, 500, 1000, 2000, 5000, float("inf")):
            text = "+Inf" if bound == float("inf") else f"{bound}.0"
            number = sum(value <= bound for value in values)
            lines.append(f'vllm:{name}_bucket{{model_name="m",le="{text}"}} {number}')
        lines.append(f'vllm:{name}_sum{{model_name="m"}} {sum(values)}')
        lines.append(f'vllm:{name}_count{{model_name="m"}} {len(values)}')
    total = sum(prompt for prompt, _ in requests)
    lines.append(f'vllm:request_success_total{{model_name="m"}} {len(requests)}')
    lines.append(f'vllm:prefix_cache_queries_total{{model_name="m"}} {total}')
    lines.append(f'vllm:prefix_cache_hits_total{{model_name="m"}} {shared * total}')
    return "\n".join([*lines, ""])


def readings(
    prompt: int, output: int, shared: float = 0.5, number: int = 200
) -> list[TrafficReading]:
    """Five pages, ten seconds apart; a thousand other requests were served before."""
    pairs = zip(lengths(prompt, number, 1), lengths(output, number, 2), strict=True)
    before: list[tuple[int, int]] = [(4000, 4000)] * 1000
    requests = [*before, *pairs]
    ends = [1000 + number * place // 4 for place in range(5)]
    pages = []
    for place, end in enumerate(ends):
        text = page(requests[:end], 0.0)
        new = sum(value for value, _ in requests[1000:end])
        text = text.rsplit("\n", 2)[0] + f'\nvllm:prefix_cache_hits_total{{m="x"}} {shared * new}\n'
        pages.append(read_page(text, 10.0 * place))
    return pages


def checks_of(*args: float, **more: float) -> dict[str, DriftCheck]:
    sample = traffic_between(readings(*args, **more))  # type: ignore[arg-type]
    return {check.part: check for check in drift(profile(), sample)}


def test_traffic_is_what_came_between_the_readings() -> None:
    sample = traffic_between(readings(300, 60))
    seen = sample.profile
    assert seen.num_requests == 200 and seen.rate == pytest.approx(5.0)
    assert seen.prompt is not None and seen.output is not None
    assert seen.prompt.mean == pytest.approx(sum(lengths(300, 200, 1)) / 200)
    assert sum(seen.prompt.counts) == 200 and seen.prompt.counts[-1] == 0
    assert seen.shared_share == pytest.approx(0.5, abs=0.01)
    assert sample.missing == () and len(sample.hits) == 4


def test_same_traffic_has_not_drifted() -> None:
    checks = checks_of(300, 60)
    assert not any(check.drifted for check in checks.values()), checks


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ((1200, 60), "prompt tokens"),
        ((300, 240), "output tokens"),
        ((300, 60, 0.05), "prefix sharing"),
    ],
)
def test_each_part_that_changed_is_named(args: tuple[float, ...], part: str) -> None:
    checks = checks_of(*args)
    assert [name for name, check in checks.items() if check.drifted] == [part]
    p_value = checks[part].p_value
    assert p_value is not None and p_value < 0.001


def test_few_requests_prove_nothing() -> None:
    checks = checks_of(1200, 60, number=20)
    assert not checks["prompt tokens"].drifted and "too few" in checks["prompt tokens"].note


@pytest.mark.parametrize(("rate", "drifted"), [(4.0, False), (8.9, False), (9.5, True)])
def test_rate_has_drifted_when_it_uses_up_what_was_sustained(rate: float, drifted: bool) -> None:
    check = load_check(10.0, rate)
    assert check.drifted == drifted and f"{rate / 10:.0%}" in check.note


def test_certain_but_small_difference_is_no_drift() -> None:
    checks = checks_of(330, 60, number=6000)
    assert not checks["prompt tokens"].drifted


def test_means_serve_where_a_server_has_no_histogram() -> None:
    first = "llamacpp:prompt_tokens_total 100\nllamacpp:tokens_predicted_total 10\n"
    last = "llamacpp:prompt_tokens_total 900\nllamacpp:tokens_predicted_total 90\n"
    sample = traffic_between([read_page(first, 0.0), read_page(last, 10.0)])
    assert sample.profile.prompt is None, "requests are not counted, so no mean is known"
    assert {"prompt", "output", "rate", "prefix sharing"} == set(sample.missing)
    counts = ("tgi_request_count {n}", "tgi_request_input_length_count {n}")
    tgi = "\n".join((*counts, "tgi_request_input_length_sum {s}", ""))
    bucket = 'tgi_request_input_length_bucket{{le="512"}} {n}\n'
    pages = [(tgi + bucket).format(n=n, s=100 * n) for n in (5, 55)]
    sample = traffic_between([read_page(text, 10.0 * i) for i, text in enumerate(pages)])
    assert sample.profile.prompt is not None and sample.profile.prompt.mean == 100


def test_restarted_server_is_missing_not_negative() -> None:
    pages = readings(300, 60)
    sample = traffic_between([pages[-1], pages[0]])
    assert sample.profile.prompt is None and sample.profile.rate is None


def test_workload_has_the_live_shape() -> None:
    seen = traffic_between(readings(1200, 100, 0.25)).profile
    workload = parse_workload(workload_of(profile(), seen))
    requests = list(workload.sample(400, 0))
    assert seen.prompt is not None and seen.output is not None
    mean = sum(len(r.prompt) for r in requests) / 400  # type: ignore[arg-type]  # tokens
    assert mean == pytest.approx(seen.prompt.mean, rel=0.15)
    assert sum(r.max_tokens for r in requests) / 400 == pytest.approx(seen.output.mean, rel=0.15)


# ---- on a twin ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_drift_is_seen_in_the_metrics_of_a_twin() -> None:
    kind, line = read_command(f"vllm serve {MODEL} --max-num-seqs 16")
    options = TwinServerOptions(command="", device="h100-sxm", speed=500.0)
    app, engine, _ = open_twin(kind, line, options, ServerOptions(port=0, served_model_name=MODEL))
    try:
        client = TestClient(app, base_url="http://127.0.0.1")

        def sample(prompt: int) -> dict[str, bool]:
            pages = [read_page(client.get("/metrics").text, 0.0)]
            for part in range(1, 4):
                for number in lengths(prompt, 12, part):
                    tokens = [random.randrange(3, 200) for _ in range(number)]
                    body = {"model": MODEL, "prompt": tokens, "max_tokens": 4}
                    assert client.post("/v1/completions", json=body).status_code == 200
                pages.append(read_page(client.get("/metrics").text, 10.0 * part))
            tuned = TrafficProfile(
                num_requests=256,
                prompt=LengthProfile.of(tuple(lengths(60, 256))),
                output=LengthProfile.of((4,) * 256),
                shared_share=0.0,
            )
            return {check.part: check.drifted for check in drift(tuned, traffic_between(pages))}

        assert not any(sample(60).values())
        assert sample(240)["prompt tokens"]
    finally:
        engine.close()


async def tuned_folder(folder: Path) -> Path:
    """The result of a search of a twin with four slots, tuned on prompts of 512 tokens."""
    found = await search_ladder(Fake(), rungs=only("continuous-batching"))
    provenance = msgspec.structs.replace(
        found.provenance, model=f"dummy:{MODEL}", slo="ttft:500 tpot:50"
    )
    measured = msgspec.structs.replace(found.final.measured, goodput_req_s=KNEE)
    ladder = msgspec.structs.replace(
        found,
        provenance=provenance,
        final=msgspec.structs.replace(found.final, measured=measured),
        traffic=TrafficProfile(
            num_requests=256,
            prompt=LengthProfile.of((512,) * 256),
            output=LengthProfile.of((64,) * 256),
            shared_share=0.0,
        ),
    )
    (folder / "ladder.json").write_bytes(msgspec.json.encode(ladder))
    command = f"ridgeline twin --device h100-sxm vllm serve {MODEL} --max-num-seqs 4 --port 8000"
    (folder / "serve.sh").write_text(f"#!/bin/sh\nexec {command}\n")
    settings = Settings(model=MODEL, max_num_seqs=4)
    runs = tuple(
        judge_run(seen_by_clients(settings, load), load, Slo.parse("ttft:500"), "goodput")
        for load in (load_at(0.7 * KNEE), load_at(1.2 * KNEE))
    )
    incumbent = SavedConfiguration(
        label="final", settings={}, info=INFO, rate=KNEE, runs=runs, settled=True
    )
    saved = SavedSearch(
        request={},
        baseline=incumbent,
        incumbent=incumbent,
        trials=(),
        tried=(),
        predictor=PredictorState(),
        budget=BudgetState(spent_s=0, window_s=1, run_costs_s=(), open_cost_s=0, baseline_run_s=0),
        seed=0,
    )
    (folder / "search.json").write_bytes(msgspec.json.encode(saved))
    assert isinstance(msgspec.json.decode(msgspec.json.encode(ladder), type=LadderResult), object)
    return folder


INFO = EngineInfo(
    model=MODEL,
    settings={},
    derivations={},
    max_model_len=4096,
    num_blocks=0,
    block_size=16,
    weight_bytes=0,
    kv_bytes_per_token=0,
    device="elsewhere",
    compute_dtype="bfloat16",
)


def reads(pages: list[TrafficReading]) -> Callable[..., TrafficReading]:
    left = iter(pages)
    return lambda options, clock: next(left)


@pytest.mark.slow
async def test_changes_are_ranked_for_the_traffic_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "probe", lambda: MACHINE)
    monkeypatch.setattr(workflow, "with_server_rungs", lambda ladder, flags, gpus: only(RUNG))
    options = WatchOptions(
        url="http://chat", tuned=await tuned_folder(tmp_path), duration=40, interval=10
    )
    times = iter([0.0, 0, 0, 10, 10, 20, 20, 30, 30, 40, 40, 50])
    monkeypatch.setattr(workflow, "_read", reads(readings(128, 60, 0.0)))
    report = watch(options, clock=lambda: next(times), sleep=lambda seconds: None)
    assert report.drifted
    assert report.capacity is not None and report.capacity > 0
    slots = [change for change in report.changes if "--max-num-seqs" in change.flags]
    assert slots, report.unranked
    assert slots[0].predicted.gain > 1.5
    assert "--workload" in report.prove and "{port}" in report.prove
    assert str(report.to_dict()["workload"]).startswith("synthetic:input=1")


@pytest.mark.slow
async def test_nothing_is_ranked_if_the_simulator_does_not_explain_the_tuned_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "probe", lambda: MACHINE)
    monkeypatch.setattr(workflow, "with_server_rungs", lambda ladder, flags, gpus: only(RUNG))
    folder = await tuned_folder(tmp_path)
    ladder = json.loads((folder / "ladder.json").read_text("utf-8"))
    ladder["final"]["measured"]["goodput_req_s"] = KNEE / 5
    (folder / "ladder.json").write_text(json.dumps(ladder), "utf-8")
    options = WatchOptions(url="http://chat", tuned=folder, duration=40, interval=10)
    times = iter([0.0, 0, 0, 10, 10, 20, 20, 30, 30, 40, 40, 50])
    monkeypatch.setattr(workflow, "_read", reads(readings(128, 60, 0.0)))
    report = watch(options, clock=lambda: next(times), sleep=lambda seconds: None)
    assert report.drifted and not report.changes and report.capacity is None
    assert "times above what was measured" in report.unranked


def test_folder_without_a_search_of_a_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="optimize --url"):
        watch(WatchOptions(url="http://h", tuned=tmp_path))


def test_server_without_traffic_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    options = WatchOptions(url="http://h", tuned=Path("x"), duration=10, interval=10)
    times = iter([0.0, 0, 0, 10, 10, 20])
    pages = [read_page("vllm:request_success_total 5\n", float(at)) for at in (0, 10)]
    monkeypatch.setattr(workflow, "_read", reads(pages))
    with pytest.raises(CannotRun, match="no request finished"):
        workflow.sample_traffic(options, lambda: next(times), lambda seconds: None)


def test_cron_job_runs_a_command_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["watch", "--url", "http://chat:8000", "--tuned", "/x", "--duration", "10m"]
    words += ["--accelerator", "l4"]
    assert main([*words, "--cronjob", "--schedule", "0 6 * * 1", "--image", "r:1"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["kind"] == "CronJob" and manifest["spec"]["schedule"] == "0 6 * * 1"
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(manifest, "1.36", strict=True)
    pod = manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert "l4" in container["args"]
    assert container["image"] == "r:1" and pod["restartPolicy"] == "Never"
    assert main([*container["args"], "--cronjob"]) == 0
    again = yaml.safe_load(capsys.readouterr().out)
    assert (
        again["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"]
        == (container["args"])
    )
    assert "--duration" in cronjob(WatchOptions(url="http://h", tuned=Path("x")))


@pytest.mark.slow
@pytest.mark.skipif("RIDGELINE_LOOP" not in os.environ, reason="a minute: make test-loop")
async def test_watch_of_a_running_twin_says_drift_and_ranks_every_rung(tmp_path: Path) -> None:
    """A process each for the server, its traffic (longer than tuned for), and the watch."""
    folder = await tuned_folder(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, ridgeline = f"http://127.0.0.1:{port}", [sys.executable, "-m", "ridgeline"]
    twin = [*ridgeline, "twin", "--device", "h100-sxm", "--speed", "20", "vllm", "serve", MODEL]
    load = [*ridgeline, "bench", "--url", url, "--workload", "synthetic:input=1536,output=48"]
    load += ["--request-rate", "12", "--num-prompts", "240"]
    watching = [*ridgeline, "watch", "--url", url, "--tuned", str(folder), "--gpus", "2"]
    watching += ["--duration", "10s", "--interval", "2s"]
    server = subprocess.Popen(
        [*twin, "--max-num-seqs", "4", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    traffic = None
    try:
        wait_until_ready(url, server)
        traffic = subprocess.Popen(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done = subprocess.run(watching, capture_output=True, text=True, timeout=240)
    finally:
        for process in (traffic, server):
            if process is not None:
                process.terminate()
                process.wait(20)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"prompt tokens +512\D+1,5\d\d +drifted", done.stdout), done.stdout
    assert "you would gain ~" in done.stdout and "--max-num-seqs" in done.stdout
    assert "Prove it with:" in done.stdout


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server answers; fails where it ends before."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        assert server.poll() is None, "the twin ended"
        try:
            urllib.request.urlopen(f"{url}/metrics", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the twin did not start")
