"""Calibrations of servers: made-up laws are found again, what they do not tell is refused, and a
server of known step_times is measured over HTTP."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.errors import BadInput, CannotRun, Inconclusive
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer
from ridgeline.measure.monitors.machine_load import LoadMeter
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.plan.calibration.calibration import load_calibration
from ridgeline.plan.calibration.remote_server import (
    DecodeSample,
    PromptSample,
    ServerRuns,
    ServerTimes,
    fit_server_times,
    predict_server_times,
)
from ridgeline.records import MachineLoad
from ridgeline.workflows.calibrate import calibrate_server
from ridgeline.workflows.calibrate.calibrate_server import calibrate_server as calibrate
from ridgeline.workflows.targets import RemoteServer
from tests.diagnose.mock_thread import mock_server

ABOUT = ServerRuns(
    server="http://here", model="m", as_of="2026-11-21", source="a test", took_s=1.0, runs=("one",)
)
LENGTHS = (16, 64, 192, 384, 768, 1536)


def true_ttft_s(tokens: float) -> float:
    return 4e-3 + 2e-4 * tokens + 1e-7 * tokens**2


def true_tpot_s(batch: float, context: float) -> float:
    return 8e-3 + 4e-4 * batch + 3e-7 * batch * context


def made_up(batches: tuple[int, ...] = (2, 8, 24)) -> ServerTimes:
    prompts = [PromptSample(n, true_ttft_s(n)) for n in LENGTHS]
    alone = [DecodeSample(1, n + 12.0, true_tpot_s(1, n + 12)) for n in LENGTHS]
    waves = [DecodeSample(b, 60.0, true_tpot_s(b, 60)) for b in batches]
    deep = [DecodeSample(4, c, true_tpot_s(4, c)) for c in (60.0, 800.0)]
    return fit_server_times(prompts, [*alone, *waves, *deep], ABOUT)


def test_fit_recovers_known_times_and_predicts_unseen_points() -> None:
    found = made_up()
    assert found.base_s == pytest.approx(4e-3, rel=0.01)
    assert found.by_pair_s == pytest.approx(1e-7, rel=0.01)
    assert found.by_context_s == pytest.approx(3e-7, rel=0.05)
    assert found.ttft_s(1000) == pytest.approx(true_ttft_s(1000), rel=0.01)
    assert found.tpot_s(12, 500) == pytest.approx(true_tpot_s(12, 500), rel=0.05)
    prediction = predict_server_times(found, isl=500, osl=64, batch=1)
    assert prediction.ttft_ms == pytest.approx(1e3 * true_ttft_s(500), rel=0.01)
    assert (
        prediction.interval["tpot_ms"][0] < prediction.tpot_ms < prediction.interval["tpot_ms"][1]
    )
    busy = predict_server_times(found, isl=500, osl=64, batch=8)
    waits_s = 7 / 64 * (true_ttft_s(500) - 4e-3)
    assert busy.tpot_ms == pytest.approx(1e3 * (true_tpot_s(8, 532) + waits_s), rel=0.05)


@pytest.mark.parametrize(
    ("isl", "osl", "batch", "said"),
    [(4000, 10, 1, "prompts"), (100, 10_000, 1, "contexts"), (100, 10, 99, "batches")],
)
def test_points_beyond_the_calibrated_range_are_rejected(
    isl: int, osl: int, batch: int, said: str
) -> None:
    with pytest.raises(CannotRun, match=said):
        predict_server_times(made_up(), isl, osl, batch)


def test_unidentifiable_terms_are_named_or_rejected() -> None:
    flat = [PromptSample(n, 0.05) for n in LENGTHS]
    decodes = [DecodeSample(b, c, 0.01) for b, c in ((1, 20.0), (1, 900.0), (2, 50.0), (8, 50.0))]
    found = fit_server_times(flat, decodes, ABOUT)
    assert {"by_pair_s", "by_context_s", "kv_tokens", "roofline"} <= set(found.unknown)
    assert found.by_pair_s == found.by_context_s == 0.0
    with pytest.raises(BadInput, match="two requests at once"):
        fit_server_times(flat, decodes[:2], ABOUT)
    with pytest.raises(BadInput, match="too few prompt lengths"):
        fit_server_times(flat[:2], decodes, ABOUT)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same five runs, made smaller."""
    monkeypatch.setattr(calibrate_server, "PROMPT_LENGTHS", (16, 64, 256))
    monkeypatch.setattr(calibrate_server, "WAVES", (2, 6))
    monkeypatch.setattr(calibrate_server, "WAVE_OUTPUT", 12)
    monkeypatch.setattr(calibrate_server, "REPEATS", 1)
    monkeypatch.setattr(LoadMeter, "read", lambda _: None)


class ChatOnly(MockServer):
    def refusal(self, path: str, body: bytes) -> tuple[int, bytes] | None:
        return None if path == "/v1/chat/completions" else (404, b"no such page")


def test_server_that_only_chats_is_measured_in_words(short: None) -> None:
    events: list[object] = []
    server = ChatOnly(MockPace(ttft_s=0.1, itl_s=0.03))
    with mock_server(server) as url:
        found = calibrate(RemoteServer(url=url), 30.0, events.append).server
    assert found is not None and found.longest_prompt == 256
    assert any("takes no token ids" in str(event) for event in events)


def test_server_that_counts_nothing_needs_a_tokenizer(short: None) -> None:
    with mock_server() as url, pytest.raises(BadInput, match="--tokenizer MODEL"):
        calibrate(RemoteServer(url=url, model="no-usage"), 30.0)


def test_busy_machine_is_named_and_nothing_is_fitted(
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(LoadMeter, "read", lambda _: MachineLoad(others_share=0.4))
    out = tmp_path / "c.json"
    with mock_server(ttft_s=0.01, itl_s=0.005) as url:
        assert main(["calibrate", "--url", url, "--output", str(out)]) == 3
    assert "40% of the CPU taken by other work" in capsys.readouterr().err
    assert not out.exists()


def test_disturbed_measurement_is_repeated(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = cycle([MachineLoad(others_share=0.4), MachineLoad(others_share=0.0)])
    monkeypatch.setattr(LoadMeter, "read", lambda _: next(loads))
    with mock_server(ttft_s=0.05, itl_s=0.02) as url:
        assert calibrate(RemoteServer(url=url), 30.0).server is not None


def test_other_clients_of_the_server_are_noticed() -> None:
    results = calibrate_server.ServerMeasurements()
    report = ServerReport(
        server="vllm", num_readings=2, means={}, p95={}, counts={"output_tokens": 200}, mean_s={}
    )
    with pytest.raises(Inconclusive, match=r"answered other clients.*50%"):
        calibrate_server.check_undisturbed(results, report, 100)
    calibrate_server.check_undisturbed(results, report, 198)
    calibrate_server.check_undisturbed(results, None, 0)


def test_server_with_known_step_times_is_measured(short: None) -> None:
    with mock_server(ttft_s=0.1, itl_s=0.03) as url:
        found = calibrate(RemoteServer(url=url), 30.0).server
    assert found is not None
    assert found.ttft_s(100) == pytest.approx(0.1, rel=0.3)
    assert found.tpot_s(4, 60) == pytest.approx(0.03, rel=0.3)
    assert len(found.runs) <= 5 and found.residuals
    assert "by_pair_s" in found.unknown


def test_server_with_one_slot_gets_a_note_and_no_fit(short: None) -> None:
    """No wave generates at once, and nothing is made up."""
    events: list[object] = []
    with (
        mock_server(ttft_s=0.02, itl_s=0.002, slots=1) as url,
        pytest.raises(BadInput, match="two requests at once"),
    ):
        calibrate(RemoteServer(url=url), 30.0, events.append)
    assert any("too few slots" in str(event) for event in events)


def test_server_calibration_works_with_predict_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    path = tmp_path / "there.json"
    path.write_bytes(msgspec.json.encode(made_up()))
    given = [
        "predict",
        "--calibration",
        str(path),
        "--input-len",
        "300",
        "--output-len",
        "32",
        "--max-concurrency",
        "2",
    ]
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decode_ms"] > 8
    assert (
        main([*given, "--tensor-parallel-size", "2"]) == 2
        and "predicts only that server" in capsys.readouterr().err
    )
    with pytest.raises(CannotRun, match="a server calibration covers"):
        load_calibration(path)
    assert main(["calibrate", "--url", "http://x", "--engine", "demo"]) == 2


def test_throughput_is_limited_by_prompt_time() -> None:
    """A server that does nothing else than prompts answers no more of them for more clients."""
    found = made_up()
    alone_s = found.ttft_s(500) - found.base_s
    assert predict_server_times(found, 500, 1, 8).output_tok_s < 1 / alone_s
