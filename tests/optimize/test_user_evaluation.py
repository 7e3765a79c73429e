"""`optimize --eval-cmd` and `--candidate-model`: the user's own gate, and checkpoints as rungs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize import ladder
from ridgeline.optimize.drivers.apply_command import flag_values
from ridgeline.optimize.drivers.server_process import replace_flags
from ridgeline.optimize.environment import Deployment, Environment, UserEvaluation
from ridgeline.optimize.external.server_rungs import candidate_model_rungs
from ridgeline.optimize.ladder import candidates_of
from ridgeline.optimize.quality.user_evaluation import UserGate, judge_scores
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.twin.servers.behaviour import format_of_checkpoint
from ridgeline.workflows.evaluate.eval_command import run_evaluation
from ridgeline.workflows.optimize.restartable_server import ServerRecipe, server_recipe
from ridgeline.workflows.optimize.server_costs import ServerCosts
from ridgeline.workflows.optimize.server_driver import RestartableServer
from tests.optimize.simulated_servers import Fake, Physics
from tests.optimize.test_search import job, only, trial_of


@pytest.mark.parametrize(
    ("before", "after", "margin", "verdict"),
    [
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 0.0, "pass"),
        ((0.80, 0.80, 0.80), (0.70, 0.70, 0.70), 0.05, "fail"),
        ((0.80, 0.81, 0.79), (0.80, 0.79, 0.80), 0.05, "pass"),
        ((0.9, 0.5, 0.7), (0.8, 0.6, 0.7), 0.05, "inconclusive"),  # noisier than the margin
        ((0.80, 0.81, 0.79), (0.80,), 0.05, "pass"),  # the baseline's spread serves for one run
        ((0.8,), (0.8,), 0.05, "inconclusive"),
        ((1.0, 1.0, 1.0), (None, None, None), 0.0, "fail"),
        ((1.0, 1.0, 1.0), (1.0, None, 1.0), 0.0, "inconclusive"),
        ((1.0, 1.0, 1.0), (), 0.0, "inconclusive"),
    ],
)
def test_scores_are_judged_with_the_noise_of_the_baseline(
    before: Sequence[float], after: Sequence[float | None], margin: float, verdict: str
) -> None:
    assert judge_scores(before, after, margin).verdict == verdict


async def test_evaluation_that_fails_on_the_baseline_is_refused() -> None:
    async def fail() -> None:
        return None

    with pytest.raises(CannotRun, match="fails on the baseline"):
        await UserGate(0.0, lambda: 0.0).score_baseline(fail, 1)


def evaluated(fake: Fake, scores: dict[str | None, float | None]) -> Environment:
    """The environment whose only gate is an evaluation with a score for each weight format."""

    async def run(deployment: Deployment) -> float | None:
        fake.clock.now_s += 1.0
        return scores[deployment.info.settings.get("quantization")]  # type: ignore[arg-type]

    return msgspec.structs.replace(
        fake.environment(), heldout=(), evaluation=UserEvaluation(run=run, margin=0.05)
    )


async def search(fake: Fake, environment: Environment) -> LadderResult:
    rungs = only("continuous-batching", "int8")
    return await optimize(job(), environment, rungs, clock=fake.clock)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("score", "verdict"), [(0.79, "kept"), (0.6, "quality failed"), (None, "quality failed")]
)
async def test_lossy_rung_is_gated_by_the_users_evaluation_alone(
    score: float | None, verdict: str
) -> None:
    fake = Fake(Physics(int8_speed=1.6))
    result = await search(fake, evaluated(fake, {None: 0.8, "int8": score}))
    trial = trial_of(result, "int8")
    assert trial.verdict == verdict, trial.reason
    assert trial.quality is not None
    assert [check.name for check in trial.quality.checks] == ["--eval-cmd, change (margin 0.05)"]


@pytest.mark.slow
async def test_lossy_rung_that_passes_the_panel_can_fail_the_evaluation() -> None:
    fake = Fake(Physics(int8_speed=1.6))
    environment = msgspec.structs.replace(
        fake.environment(), evaluation=evaluated(fake, {None: 0.8, "int8": 0.5}).evaluation
    )
    trial = trial_of(await search(fake, environment), "int8")
    assert trial.verdict == "quality failed" and "--eval-cmd" in trial.reason
    assert trial.quality is not None and trial.quality.num_windows > 0


async def test_broken_evaluation_ends_the_search_at_once() -> None:
    fake = Fake()
    with pytest.raises(CannotRun, match="fails on the baseline"):
        await search(fake, evaluated(fake, {None: None}))
    assert fake.clock.now_s < 10


def test_command_is_run_with_address_and_model(tmp_path: Path) -> None:
    script = tmp_path / "evals.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nprint(0.25)")
    command = f"{sys.executable} -IS {script} {{url}} {{model}}"
    assert asyncio.run(run_evaluation(command, "http://h", "m")) == 0.25
    assert asyncio.run(run_evaluation("false {url}", "http://h")) is None
    with pytest.raises(CannotRun, match="cannot be started"):
        asyncio.run(run_evaluation("no-such-program {url}", "http://h"))
    with pytest.raises(BadInput, match=r"\{url\}"):
        RestartableServer(url="http://h", docker="c", eval_cmd="pytest evals")


# ---- checkpoints -------------------------------------------------------------------------------

LLAMA, AWQ = "meta-llama/Llama-3.1-8B-Instruct", "org/Llama-3.1-8B-Instruct-AWQ-INT4"


def test_words_of_a_command_line_are_replaced() -> None:
    flags = [f"@{LLAMA}", AWQ, "--served-model-name", LLAMA]
    words, added = replace_flags(["vllm", "serve", LLAMA, "--seed", "1"], flags)
    assert words == ["vllm", "serve", AWQ, "--seed", "1"]
    assert added == ["--served-model-name", LLAMA]
    words, _ = replace_flags([f"--model-id={LLAMA}"], flags)
    assert words == [f"--model-id={AWQ}"]
    assert flag_values([*flags, "!--a"]) == {
        f"@{LLAMA}": AWQ,
        "--served-model-name": LLAMA,
        "!--a": True,
    }


def recipe(tmp_path: Path, command: str) -> ServerRecipe:
    server = RestartableServer(
        url="http://127.0.0.1:{port}", restart_cmd=command, candidate_models=(AWQ,)
    )
    return server_recipe(server, tmp_path)


def test_candidate_model_becomes_a_lossy_rung_whose_gain_is_predicted(tmp_path: Path) -> None:
    command = f"ridgeline twin --device l4 vllm serve {LLAMA} --port {{port}} {{flags}}"
    found = recipe(tmp_path, command)
    start = found.start_settings(Settings(model="dummy:llama-3.1-8b"))
    [rung] = found.candidate_rungs
    assert rung.honesty == "lossy"
    [candidate] = candidates_of(rung, start, {})
    words = found.command.words(found.flags.words(candidate.settings, start), 9000)
    assert AWQ in words and words.count(LLAMA) == 1
    assert words[words.index("--served-model-name") + 1] == LLAMA
    assert AWQ in candidate.label
    costs = ServerCosts(None, found, start)
    config = costs.modelled_server(candidate.settings)
    assert config is not None and config.weight_dtype == "int4"
    effect = costs.flag_effect(candidate.settings, start)
    assert effect is not None and effect([(1, 500)] * 4, 4) < 0.6


def test_name_that_clients_use_is_kept_as_given() -> None:
    [rung] = candidate_model_rungs("vllm", "vllm serve a --served-model-name x", "a", ["b"])
    assert rung.variants == ({"server_flags": {"@a": "b"}},)
    assert isinstance(rung, ladder.Rung)


def test_command_without_a_model_cannot_take_a_candidate(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="names none"):
        _ = recipe(tmp_path, "vllm --port {port} {flags}").candidate_rungs


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("org/Llama-3.1-8B-Instruct-FP8", "fp8"),
        ("Qwen3-8B-AWQ", "int4"),
        ("org/model-quantized.w8a8", "int8"),
        ("gpt-oss-20b", None),
        ("model-Q4_K_M.gguf", "int4"),
    ],
)
def test_weight_format_is_read_from_a_checkpoints_name(name: str, form: str | None) -> None:
    assert format_of_checkpoint(name) == form
