"""Diagnosis without step records: from a server's metrics, and against an earlier run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.commands.measure.diagnose import run_diagnose
from ridgeline.config.load import BenchOptions, BenchReport, DiagnoseOptions
from ridgeline.diagnose.facts import facts_of
from ridgeline.diagnose.losses.expected_steps import learn
from ridgeline.diagnose.losses.observed_steps import infer_steps_from_tokens
from ridgeline.diagnose.losses.server_losses import attribute_server_latency
from ridgeline.diagnose.losses.step_facts import batch_facts, missed_prefix
from ridgeline.diagnose.rules.findings import findings
from ridgeline.errors import BadInput
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.measure.results.event_log import RunContext, write_run
from ridgeline.records.progress import silent
from ridgeline.workflows.diagnose.diagnose import diagnose, read_recorded_run
from ridgeline.workflows.diagnose.diagnose_run import diagnose_run
from ridgeline.workflows.diagnose.server_facts import server_metrics
from ridgeline.workflows.load.load_session import load_session, run_context
from ridgeline.workflows.targets import RemoteServer
from tests.diagnose.faults import DECODING, LOADS, OVERLOADED, SLO, Engine, run

pytestmark = pytest.mark.slow


def measure(options, url):
    """One run against the server, with the report of its monitors."""
    with load_session(options, RemoteServer(url=url), silent) as session:
        return asyncio.run(session.run(options))


def as_server(engine, load=LOADS[0]):
    """A run as a client sees it over HTTP, and the means that the server would report."""
    record, _ = run(engine, load)
    done = [r for r in record.requests if r.token_s]
    metrics = {
        "queue_s": sum(r.started_s - r.sent_s for r in done) / len(done),
        "kv_used_share_p95": max(s.used_blocks / s.num_blocks for s in record.steps),
        "preemptions": float(sum(s.num_preempted for s in record.steps)),
    }
    blind = tuple(
        msgspec.structs.replace(r, started_s=None, first_computed_s=None) for r in record.requests
    )
    return msgspec.structs.replace(record, requests=blind, steps=()), metrics


def named(engine, load=LOADS[0]):
    record, metrics = as_server(engine, load)
    found = attribute_server_latency(record, metrics)
    return [finding.cause for finding in findings(found, facts_of(record, SLO), "vllm")]


def test_server_is_diagnosed_from_its_histograms() -> None:
    assert named(Engine()) == []
    assert named(replace(Engine(), slots=2))[0] == "too-few-slots"
    assert named(replace(Engine(), blocks=60))[0] == "kv-cache-too-small"
    assert named(replace(Engine(), send_every_s=0.2))[0] == "client-sends-late"


@pytest.mark.parametrize(
    ("engine", "cause"),
    [(OVERLOADED, "more-comes-than-can-be-served"), (replace(Engine(), slots=2), "too-few-slots")],
)
def test_overload_is_found_without_step_records(engine, cause) -> None:
    """From its token times; within 10 % of the figure from step records."""
    whole, _ = run(engine, DECODING)
    record, reported = as_server(engine, DECODING)
    known, seen = batch_facts(whole.steps), batch_facts(infer_steps_from_tokens(record))
    assert seen["doubled_batch_gain"] == pytest.approx(known["doubled_batch_gain"], rel=0.1)
    report = ServerReport(
        server="vllm",
        num_readings=3,
        means={},
        p95={},
        counts={},
        mean_s={"queue_s": reported["queue_s"]},
    )
    found = diagnose_run(record, RunContext(server=report), None).findings
    assert found[0].cause == cause


def test_no_queue_is_assumed_without_server_metrics() -> None:
    record, _ = as_server(replace(Engine(), slots=2))
    found = attribute_server_latency(record, {})
    assert found.shares["slots"].mid == 0
    assert found.shares["prefill"].mid > 0.5


def test_growing_queue_is_not_attributed_to_prefill() -> None:
    """Requests differ from the mean, but the stages must add up to the true sums."""
    record, metrics = as_server(replace(Engine(), slots=2))
    done = [r for r in record.requests if r.token_s]
    to_first_s = sum(r.token_s[0] - r.sent_s for r in done) / len(done)
    total_s = sum(r.token_s[-1] - r.scheduled_s for r in done)
    for reported in (
        {"queue_s": metrics["queue_s"]},
        {"prefill_s": to_first_s - metrics["queue_s"], "waiting_p95": 3.0},
        {"queue_s": metrics["queue_s"], "prefill_s": to_first_s - metrics["queue_s"]},
    ):
        shares = attribute_server_latency(record, reported).shares
        truth = metrics["queue_s"] * len(done) / total_s
        assert shares["slots"].mid == pytest.approx(truth, rel=0.05), reported
        assert shares["front"].mid < 0.02


def test_queue_time_without_waiting_requests_has_no_cause() -> None:
    """A request that arrives during a step is admitted after it; no slot was missing."""
    record, metrics = as_server(replace(Engine(), slots=2))
    queued = attribute_server_latency(record, metrics).shares["slots"].mid
    half = attribute_server_latency(record, {**metrics, "waited_s": metrics["queue_s"] / 2}).shares
    assert half["slots"].mid == pytest.approx(queued / 2)
    idle = attribute_server_latency(record, {**metrics, "waited_s": 0.0}).shares
    assert idle["slots"].mid == idle["policy"].mid == idle["backlog"].mid == 0.0


def test_queue_is_divided_by_the_servers_counters() -> None:
    record, metrics = as_server(replace(Engine(), slots=2))
    queued = attribute_server_latency(record, metrics).shares["slots"].mid
    counted = {"waited_s": 9e9, "full_waiting_share": 0.5, "spent_waiting_share": 0.3}
    shares = attribute_server_latency(record, {**metrics, **counted}).shares
    parts = {name: shares[name].mid / queued for name in ("slots", "backlog", "policy")}
    assert parts == pytest.approx({"slots": 0.5, "backlog": 0.3, "policy": 0.2})
    short = attribute_server_latency(record, {**metrics, **counted, "preemptions": 3.0}).shares
    assert short["kv"].mid == pytest.approx(queued) and short["slots"].mid == 0.0


def test_per_request_timings_of_the_server_are_used() -> None:
    record, metrics = as_server(replace(Engine(), slots=2))
    timed, _ = run(replace(Engine(), slots=2), LOADS[0])
    record = msgspec.structs.replace(
        record,
        requests=tuple(
            msgspec.structs.replace(seen, started_s=own.started_s)
            for seen, own in zip(record.requests, timed.requests, strict=True)
        ),
    )
    done = [r for r in record.requests if r.token_s]
    total_s = sum(r.token_s[-1] - r.scheduled_s for r in done)
    prefill_s = sum(r.token_s[0] - r.started_s for r in done)
    shares = attribute_server_latency(record, {**metrics, "prefill_s": 99.0}).shares
    assert shares["prefill"].mid == pytest.approx(prefill_s / total_s)


def test_cache_without_lookups_counts_as_off() -> None:
    record, _ = as_server(Engine())
    silent = msgspec.structs.replace(
        record, requests=tuple(msgspec.structs.replace(r, cached_tokens=0) for r in record.requests)
    )
    assert missed_prefix(silent, 0.5, {"queried_tokens": 0.0, "hit_tokens": 0.0}) == 0.5
    assert missed_prefix(silent, 0.5, {"hit_share": 0.4}) == pytest.approx(0.1)  # SGLang's gauge


def test_waiting_counters_become_means_per_request() -> None:
    record, _ = as_server(Engine())
    num_served = len([r for r in record.requests if r.token_s])
    counts = {
        "waiting_total_s": 2.0 * num_served,
        "full_waiting_total_s": 0.5 * num_served,
        "spent_waiting_total_s": 1.0 * num_served,
    }
    report = ServerReport(
        server="ridgeline",
        num_readings=3,
        means={"waiting": 77.0, "slots": 64.0},
        p95={},
        counts=counts,
        mean_s={"prefill_s": 0.1},
    )
    found = server_metrics(report, record)
    assert found["waited_s"] == pytest.approx(2.0)
    assert (found["full_waiting_share"], found["spent_waiting_share"]) == (0.25, 0.5)
    gauge = server_metrics(msgspec.structs.replace(report, counts={}), record)
    assert gauge["waited_s"] == pytest.approx(77.0 * record.duration_s / num_served)
    assert "queue_s" not in gauge and "full_waiting_share" not in gauge


def test_recorded_run_of_an_unknown_server_has_no_flags(tmp_path) -> None:
    record, _ = as_server(replace(Engine(), send_every_s=0.2))
    sides = {"ours": record, "theirs": msgspec.structs.replace(record, info=None)}
    for name, side in sides.items():
        write_run(side, tmp_path / name)
        found = diagnose(BenchOptions(), tmp_path / name)
        assert found.server == ("ridgeline" if name == "ours" else "another")
        assert found.findings[0].cause == "client-sends-late"


def test_remaining_time_is_attributed_to_the_front_end() -> None:
    record, _ = as_server(Engine())
    done = [r for r in record.requests if r.token_s]
    to_first_s = sum(r.token_s[0] - r.sent_s for r in done) / len(done)
    reported = {"prefill_s": to_first_s / 4, "waiting_p95": 0.0}
    shares = attribute_server_latency(record, reported).shares
    assert shares["slots"].mid == 0
    assert shares["front"].mid == pytest.approx(3 * shares["prefill"].mid, rel=0.2)


def test_hit_counters_of_the_server_are_used() -> None:
    record, _ = as_server(Engine())
    silent = msgspec.structs.replace(
        record, requests=tuple(msgspec.structs.replace(r, cached_tokens=0) for r in record.requests)
    )
    assert missed_prefix(silent, 0.5) == 0
    assert missed_prefix(silent, 0.5, {"queried_tokens": 100.0, "hit_tokens": 40.0}) == (
        pytest.approx(0.1)
    )


def test_findings_name_the_flag_of_the_server() -> None:
    record, metrics = as_server(replace(Engine(), slots=2))
    lost = attribute_server_latency(record, metrics)
    flags = {
        server: findings(lost, facts_of(record, SLO), server)[0].flag
        for server in ("vllm", "sglang", "llama.cpp", "tgi")
    }
    assert flags["vllm"] == "--max-num-seqs" and flags["llama.cpp"] == "--parallel"
    assert len(set(flags.values())) == 4


def test_baseline_reveals_a_slower_machine(tmp_path) -> None:
    healthy, _ = run(Engine(), LOADS[1])
    expected = learn(healthy.steps)
    errors = [abs(expected.seconds(s) / s.run_s - 1) for s in healthy.steps]
    assert sorted(errors)[len(errors) // 2] < 0.05
    assert learn(healthy.steps[:5]) is None
    slower, _ = run(replace(Engine(), slower=1.8), LOADS[1], seed=3)
    for name, record in (("a.jsonl", healthy), ("b.jsonl", slower)):
        write_run(record, tmp_path / name)
    slow, fast = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    found = diagnose(BenchOptions(), slow, baseline=fast)
    assert [finding.cause for finding in found.findings] == ["machine-slower-than-it-was"]
    assert diagnose(BenchOptions(), fast, baseline=fast).findings == ()
    console = Console(record=True, width=300)
    run_diagnose(BenchOptions(), slow, DiagnoseOptions(), console=console)


def test_command_prints_findings_and_evidence(tmp_path, capsys) -> None:
    record, _ = run(replace(Engine(), slots=2), LOADS[0])
    log = tmp_path / "run.jsonl"
    write_run(record, log)
    console = Console(record=True, width=300)
    run_diagnose(BenchOptions(), log, DiagnoseOptions(), console=console)
    text = console.export_text()
    for fragment in (
        "1. queue-bound",
        "fix",
        "--max-num-seqs",
        "trade-off",
        "will not help",
        "up to",
    ):
        assert fragment in text
    capsys.readouterr()
    run_diagnose(BenchOptions(), log, DiagnoseOptions(json=True))
    output = json.loads(capsys.readouterr().out)
    assert output["findings"][0]["cause"] == "too-few-slots"


def test_run_without_served_requests_is_an_error(tmp_path) -> None:
    record, _ = run(Engine(), LOADS[0])
    empty = msgspec.structs.replace(record, requests=(), steps=())
    write_run(empty, tmp_path / "run.jsonl")
    with pytest.raises(BadInput, match="nothing to diagnose"):
        diagnose(BenchOptions(), tmp_path / "run.jsonl")


def test_server_over_tcp_is_measured_and_diagnosed() -> None:
    """The scripted server with one slot and a queue that its gauge tells."""
    from tests.diagnose.mock_thread import mock_server

    options = BenchOptions(
        workload="synthetic:input=8,output=4", num_prompts=40, request_rate=200.0, num_warmups=0
    )
    with mock_server(slots=1, ttft_s=0.02, itl_s=0.001) as url:
        found = diagnose(options, RemoteServer(url=url))
    assert found.server == "vllm"
    assert found.findings[0].cause == "too-few-slots"
    assert found.metrics["waiting"] > 1


def test_logged_run_gives_the_same_diagnosis_as_live(tmp_path) -> None:
    """Server counters and all, from the log, from its folder, and from a table."""
    from tests.diagnose.mock_thread import mock_server

    options = BenchOptions(
        workload="synthetic:input=32,output=4,prefix=16",
        num_prompts=40,
        request_rate=200.0,
        num_warmups=0,
    )
    with mock_server(slots=1, ttft_s=0.02, itl_s=0.001) as url:
        record, observed = measure(options, url)
    context = run_context(options, observed)
    live = diagnose_run(record, context, options.slo)
    assert live.findings and live.metrics["waiting"] > 1 and context.shared_prompt_share > 0.3
    for name in ("run.jsonl", "run.parquet"):
        folder = tmp_path / name[4:]
        folder.mkdir()
        write_run(record, folder / name, context)
        assert diagnose(BenchOptions(), folder) == live
        assert diagnose(BenchOptions(), folder / name) == live


def test_bench_output_suffices_for_a_later_diagnosis(tmp_path) -> None:
    from ridgeline.cli.commands.measure.bench import run_bench
    from tests.diagnose.mock_thread import mock_server

    options = BenchOptions(
        workload="synthetic:input=8,output=4", num_prompts=30, request_rate=200.0, num_warmups=0
    )
    with mock_server(slots=1, ttft_s=0.02, itl_s=0.001) as url:
        outputs = BenchReport(log=tmp_path / "run.jsonl", output_json=tmp_path / "run.json")
        assert run_bench(options, RemoteServer(url=url), outputs, Console(record=True)) == 0
    later = diagnose(BenchOptions(), tmp_path)
    assert later.server == "vllm" and later.findings[0].cause == "too-few-slots"
    record, context = read_recorded_run(tmp_path)
    assert context.server is not None and len(record.requests) == 30
    write_run(record, tmp_path / "run.jsonl")  # as an older version wrote it
    again = diagnose(BenchOptions(), tmp_path)
    assert again.metrics == later.metrics and again.server == "vllm"
    alone = diagnose(BenchOptions(), tmp_path / "run.jsonl")
    assert "waiting" not in alone.metrics


def test_warm_up_is_excluded_from_server_metrics() -> None:
    """Its means would be of other requests, and the difference would pass for the front end's."""
    from tests.diagnose.mock_thread import mock_server

    options = BenchOptions(workload="synthetic:input=8,output=4", num_prompts=10, num_warmups=30)
    with mock_server(ttft_s=0.01, itl_s=0.001) as url:
        record, observed = measure(options, url)
    assert observed.server.counts["output_tokens"] == sum(r.output_tokens for r in record.requests)


def test_page_shows_findings_and_escapes_them(tmp_path) -> None:
    record, _ = run(replace(Engine(), slots=2), LOADS[0])
    record = msgspec.structs.replace(record, target="<b>mine</b>")
    write_run(record, tmp_path / "run.jsonl")
    page = tmp_path / "page.html"
    diagnose(BenchOptions(), tmp_path / "run.jsonl").save(page)
    text = page.read_text(encoding="utf-8")
    assert "queue-bound" in text and "--max-num-seqs" in text and "<b>mine" not in text
