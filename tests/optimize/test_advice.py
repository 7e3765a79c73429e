"""Advice: a server is measured, changes are predicted, and nothing is applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.main import main
from ridgeline.cli.render.improve.advice import print_advice
from ridgeline.config.improve import OptimizeOptions
from ridgeline.config.settings import Settings
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput, CannotRun
from ridgeline.measure.workload import parse_workload
from ridgeline.optimize.drivers.fixed_server import FixedServer
from ridgeline.optimize.environment import Deployment, Load
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import Ladder, candidates_of, load_default_ladder
from ridgeline.optimize.ranking.predictor import Forecast
from ridgeline.optimize.ranking.rung_ranking import RankedRungs
from ridgeline.optimize.result import GainPrediction
from ridgeline.optimize.search import rank_rungs
from ridgeline.records import RunTrace
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload, prompt_of
from ridgeline.workflows.optimize import advise as workflow
from ridgeline.workflows.optimize.server_driver import RestartableServer, read_server
from tests.optimize.simulated_servers import Fake, Physics
from tests.optimize.test_search import job


async def ranked(fake: Fake) -> tuple[RankedRungs, list[Settings]]:
    environment, opened = fake.environment(), []

    @contextmanager
    def open_counted(settings: Settings) -> Iterator[Deployment]:
        opened.append(settings)
        with environment.open(settings) as deployment:
            yield deployment

    counted = msgspec.structs.replace(environment, open=open_counted)
    result = await rank_rungs(job(), counted, load_default_ladder(), clock=fake.clock)
    return result, opened


async def test_changes_are_ranked_by_prediction_and_only_the_baseline_is_opened() -> None:
    result, opened = await ranked(Fake())
    assert opened == [job().settings]
    assert result.baseline.measured.goodput_req_s > 0
    gains = [f.predicted.gain for f in result.forecasts if f.predicted and not f.predicted.note]
    assert gains[0] > 1.5
    first = result.forecasts[0].predicted
    assert first is not None and first.low < first.gain < first.high
    assert result.left_out


@pytest.mark.parametrize("run_s", [4.0, 30.0])
async def test_slow_simulations_end_with_the_budget_and_name_what_they_left(run_s: float) -> None:
    fake = Fake()
    environment = fake.environment()

    def run_slowly(settings: Settings, load: Load) -> RunTrace:
        fake.clock.now_s += run_s
        return oracle.run(settings, load)

    oracle = environment.simulator
    simulator = cast("Any", SimpleNamespace(learn=oracle.learn, run=run_slowly))
    slow = msgspec.structs.replace(environment, simulator=simulator)
    result = await rank_rungs(job(), slow, load_default_ladder(), clock=fake.clock)
    assert fake.clock.now_s <= job().budget_s
    notes = [row.predicted.note for row in result.forecasts if row.predicted is not None]
    late = [note for note in notes if note == "not ranked: the budget left no time to simulate it"]
    assert late and result.baseline.measured.goodput_req_s > 0
    assert (len(late) < len(notes)) == (run_s == 4.0)


def test_texts_without_a_tokenizer_here_name_what_a_user_can_do() -> None:
    model = "dummy:llama-3.1-8b"
    texts = TokenizedWorkload(parse_workload("chat"), load_tokenizer(model))
    with pytest.raises(BadInput, match=f"{model} has no tokenizer here.*MODEL.*synthetic:"):
        texts.requests(2, 0)
    ids = TokenizedWorkload(
        parse_workload("synthetic:input=8,output=4"), load_tokenizer(model)
    ).requests(2, 0)
    assert [len(prompt_of(request)) for request in ids] == [8, 8]


SERVER_CMD = "vllm serve dummy:llama-3.1-8b --max-num-seqs 8"


async def test_advice_has_flags_intervals_and_commands_to_verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forecast_of, _ = await ranked(Fake())
    server = RestartableServer(url="http://127.0.0.1:9", server_cmd=SERVER_CMD)
    monkeypatch.setattr(workflow, "probe", lambda: SimpleNamespace(gpus=()))
    monkeypatch.setattr(workflow, "run_async", lambda coroutine: coroutine)

    def rank(job: OptimizeJob, environment: object, ladder: Ladder, **_: object) -> RankedRungs:
        [rung] = [row for row in ladder.rungs if row.id == "batch-limit"]
        forecasts = [
            Forecast(candidate=row, predicted=GainPrediction(gain=2.0, low=1.6, high=2.4))
            for row in candidates_of(rung, job.settings, {"max_num_seqs": 8})
        ]
        return msgspec.structs.replace(forecast_of, forecasts=tuple(forecasts))

    monkeypatch.setattr(workflow, "rank_rungs", rank)
    monkeypatch.setattr(
        "ridgeline.workflows.optimize.server_environment.server_environment",
        lambda *_: Fake().environment(),
    )
    advice = workflow.advise(Settings(model="demo"), OptimizeOptions(model="demo"), server)
    assert advice.server_kind == "vllm" and advice.command == SERVER_CMD
    assert "taken to run on this machine" in advice.assumed
    assert advice.verify[0] == "mkdir -p before after"  # bench refuses a missing folder
    assert any("ridgeline compare" in line for line in advice.verify)
    change = next(row for row in advice.changes if "--max-num-seqs" in row.flags)
    assert change.flags[1] in change.command and "--max-num-seqs 8" not in change.command + " "
    assert change.predicted is not None and change.dollars is not None
    print_advice(Console(width=200), advice)
    text = capsys.readouterr().out
    assert "nothing was changed" in text and "ridgeline compare before after" in text
    assert f"flags    --max-num-seqs {change.flags[1]}" in text


def test_server_without_known_flags_needs_a_hint(tmp_path: Path) -> None:
    server = RestartableServer(url="http://h")
    with pytest.raises(BadInput, match="--server-cmd"):
        read_server(server, tmp_path, print)
    command, place = read_server(msgspec.structs.replace(server, server="sglang"), tmp_path, print)
    assert command.command.startswith("sglang") and place is None
    with pytest.raises(BadInput, match="starts none"):
        read_server(
            msgspec.structs.replace(server, restart_cmd="vllm serve m {flags}"), tmp_path, print
        )


def test_measured_server_takes_no_flags(tmp_path: Path) -> None:
    server = FixedServer("http://127.0.0.1:9")
    assert server.configure([], tmp_path) is server
    with pytest.raises(CannotRun, match="only measured"):
        server.configure(["--x"], tmp_path)
    with pytest.raises(CannotRun, match="does not answer"):
        server.start()


def test_advice_without_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "demo", "--advise"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "which"), [(1 / 6, "above"), (6.0, "below")])
async def test_nothing_is_ranked_where_the_simulated_server_is_another(
    factor: float, which: str
) -> None:
    """Steps that the simulator takes for six times as fast, or slow, as they are."""
    truth = Physics()
    believed = replace(
        truth,
        fixed_s=truth.fixed_s * factor,
        per_seq_s=truth.per_seq_s * factor,
        per_token_s=truth.per_token_s * factor,
    )
    result, _ = await ranked(Fake(believed=believed))
    assert f"times {which} what was measured" in result.misfit
    assert result.forecasts
    for forecast in result.forecasts:
        assert forecast.predicted is not None and forecast.predicted.gain == 1.0
        assert "does not fit what was measured" in forecast.predicted.note
    fitting, _ = await ranked(Fake(believed=replace(truth, fixed_s=1.2 * truth.fixed_s)))
    assert not fitting.misfit
