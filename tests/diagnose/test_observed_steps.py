"""Phases inferred from the clients' token times, compared with the engine's step records."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.render.measure.diagnose import print_diagnosis
from ridgeline.config.load import BenchOptions
from ridgeline.diagnose.losses.observed_steps import infer_steps_from_tokens
from ridgeline.errors import BadInput
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.measure.results.event_log import RunContext, write_run
from ridgeline.roofline import phase_of
from ridgeline.workflows.diagnose.diagnose import ReferenceDevice, diagnose
from ridgeline.workflows.diagnose.roofline_points import prefill_start, run_roofline
from ridgeline.workflows.targets import RemoteServer, model_on_device
from tests.diagnose.faults import LOADS, Engine, run

DEVICE = model_on_device("dummy:tinyllama-1.1b", "h100-sxm")
CHUNKED = replace(Engine(), budget=64)  # prompts take several steps, mixed with decoding


def blind(record, **changes):
    """As a client sees it: no steps, nothing of the engine's instants."""
    requests = tuple(
        msgspec.structs.replace(r, started_s=None, first_computed_s=None, **changes)
        for r in record.requests
    )
    return msgspec.structs.replace(record, requests=requests, steps=(), info=None)


def points(record, words=None, context=None):
    roof = run_roofline(record, context or RunContext(), words or {}, DEVICE)
    return {point.phase: point for point in roof.points}, roof.note


def prefill_mean_s(record):
    done = [r for r in record.requests if r.token_s]
    return sum(r.token_s[0] - r.started_s for r in done) / len(done)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Engine(), CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_inferred_phases_match_the_recorded_steps(engine, load) -> None:
    record, _ = run(engine, load)
    truth, own = points(record)
    found, note = points(blind(record), {"prefill_s": prefill_mean_s(record)})
    assert "own records" in own and "as clients saw them" in note
    assert found.keys() == truth.keys() >= {"decode", "mixed"}
    assert found["decode"].intensity == pytest.approx(truth["decode"].intensity, rel=0.05)
    assert found["decode"].share_of_roof == pytest.approx(truth["decode"].share_of_roof, rel=0.1)
    assert found["mixed"].intensity == pytest.approx(truth["mixed"].intensity, rel=0.2)
    assert found["mixed"].share_of_roof == pytest.approx(truth["mixed"].share_of_roof, rel=0.2)


def largest_mixed_chunk(steps):
    return max(max(new for new, _ in s.shapes) for s in steps if phase_of(s) == "mixed")


def test_chunked_prompt_is_not_mistaken_for_decoding() -> None:
    """Without the spread, all of a prompt would stand in the step of its first token."""
    record, _ = run(CHUNKED, LOADS[2])
    seen = blind(record)
    prefill_s = {"prefill_s": prefill_mean_s(record)}
    spread = infer_steps_from_tokens(seen, began=prefill_start(prefill_s))
    assert largest_mixed_chunk(infer_steps_from_tokens(seen)) > 2 * CHUNKED.budget
    assert largest_mixed_chunk(spread) < 2 * CHUNKED.budget
    computed = sum(r.prompt_tokens - r.cached_tokens for r in seen.requests)
    for steps in (infer_steps_from_tokens(seen), spread):
        prompts = sum(new for s in steps for new, _ in s.shapes if new > 1)
        assert prompts == pytest.approx(computed, rel=0.01)


def test_sources_of_the_prefill_start() -> None:
    request = blind(run(Engine(), LOADS[0])[0]).requests[0]
    first_s = request.token_s[0]
    timed = msgspec.structs.replace(request, started_s=first_s - 0.01)
    assert prefill_start({"prefill_s": 9.0})(timed) == timed.started_s
    assert prefill_start({"prefill_s": 0.02})(request) == pytest.approx(first_s - 0.02)
    assert prefill_start({"waiting_p95": 0.0})(request) == request.sent_s
    assert prefill_start({"waiting_p95": 2.0})(request) is None


def test_several_tokens_per_chunk_give_one_point_or_none() -> None:
    record, _ = run(Engine(), LOADS[0])
    coarse = blind(record)
    coarse = msgspec.structs.replace(
        coarse,
        requests=tuple(
            msgspec.structs.replace(
                r, token_s=r.token_s[::2], token_counts=(2,) * len(r.token_s[::2])
            )
            for r in coarse.requests
        ),
    )
    found, note = points(coarse)
    assert found == {} and "no phase can be placed" in note
    steps = len([step for step in record.steps if step.shapes])
    report = ServerReport(
        server="vllm", num_readings=2, means={}, p95={}, counts={"num_steps": steps}, mean_s={}
    )
    found, note = points(coarse, context=RunContext(server=report))
    assert found["mixed"].name == "whole run" and f"{steps:,} steps" in note
    truth, _ = points(record)
    flops = sum(p.achieved_flops_s * p.time_s for p in truth.values())
    mine = found["mixed"].achieved_flops_s * found["mixed"].time_s
    assert mine == pytest.approx(flops, rel=0.05)


@pytest.mark.slow
def test_recorded_run_has_a_roofline_if_the_device_is_named(tmp_path) -> None:
    record, _ = run(Engine(), LOADS[0])
    log, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    console = Console(record=True, width=300)
    write_run(blind(record), log)
    reference = ReferenceDevice(model="dummy:tinyllama-1.1b", accelerator="2xh100-sxm")
    diagnosis = diagnose(BenchOptions(), log, reference=reference)
    print_diagnosis(diagnosis, console)
    diagnosis.save(page)
    text = console.export_text()
    assert "FLOP/byte" in text and "(bandwidth)" in text and "as clients saw them" in text
    drawn = page.read_text(encoding="utf-8")
    assert "data sheet of h100-sxm" in drawn and "<svg" in drawn
    with pytest.raises(BadInput, match="needs the model"):
        unnamed = ReferenceDevice(model=None, accelerator="h100-sxm")
        diagnose(BenchOptions(), log, reference=unnamed)


@pytest.mark.slow
def test_own_log_names_its_model(tmp_path) -> None:
    """It also records the weight format: int8 halves the bytes, so that the intensity doubles."""
    record, _ = run(Engine(), LOADS[0])
    info = record.info

    def decode(**changes):
        settings = {**info.settings, "model": "dummy:tinyllama-1.1b", **changes}
        own = msgspec.structs.replace(info, settings=settings, compute_dtype="bfloat16")
        write_run(msgspec.structs.replace(record, info=own), tmp_path / "run.jsonl")
        reference = ReferenceDevice(model=None, accelerator="a100-80-sxm")
        found = diagnose(BenchOptions(), tmp_path / "run.jsonl", reference=reference)
        return next(p for p in found.roof.points if p.phase == "decode")

    assert decode(quantization="int8").intensity > 1.5 * decode().intensity


def test_server_over_tcp_gets_roofline_points() -> None:
    from tests.diagnose.mock_thread import mock_server

    options = BenchOptions(
        workload="synthetic:input=8,output=12", num_prompts=20, max_concurrency=2, num_warmups=0
    )
    reference = ReferenceDevice(model="dummy:tinyllama-1.1b", accelerator="h100-sxm")
    with mock_server(ttft_s=0.02, itl_s=0.005) as url:
        found = diagnose(options, RemoteServer(url=url), reference=reference)
    decode = next(point for point in found.roof.points if point.phase == "decode")
    assert 1.5 < decode.intensity < 6  # one or two sequences over bfloat16 weights: two each
    assert decode.num_steps > 20
