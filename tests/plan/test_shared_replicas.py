"""Replicas that several schedulers share: stages, attention groups, models; resumed requests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import ridgeline
from ridgeline.cli.main import main
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput, DoesNotFit
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.further_models import divide_memory
from ridgeline.plan.simulate.records import (
    FaultModel,
    FleetConfig,
    FleetOutcome,
    LaneConfig,
    ReplicaConfig,
    SimulatedRequest,
)
from ridgeline.plan.simulate.summary import summarise
from ridgeline.plan.step_time.memory import UTILIZATION, MemoryLimits
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.plan.step_time.replica import build_replica
from ridgeline.records import Slo
from tests.plan.constant_step_times import ConstantStepTimes
from tests.plan.test_fleet import conserved, make

STEP_S = 0.012


def replica(scheduler: Callable[[], Scheduler] | None = None, **more: object) -> ReplicaConfig:
    fields = {
        "name": "test",
        "scheduler": make(slots=4) if scheduler is None else scheduler,
        "step_times": ConstantStepTimes(STEP_S),
        **more,
    }
    return ReplicaConfig(**fields)  # type: ignore[arg-type]


def run(requests: list[SimulatedRequest], *replicas: ReplicaConfig, **more: object) -> FleetOutcome:
    config = FleetConfig(replicas=replicas, check=conserved, **more)  # type: ignore[arg-type]
    outcome = simulate_fleet(requests, config)
    assert all(not result.error for result in outcome.requests)
    return outcome


def at_once(count: int, model: str = "", num_output: int = 20) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(at_s=0.0, num_prompt=4, num_output=num_output, model=model)
        for _ in range(count)
    ]


@pytest.mark.parametrize("stages", [2, 4])
def test_full_pipeline_ends_a_step_of_every_micro_batch_in_one_pass(stages: int) -> None:
    outcome = run(at_once(stages), replica(num_stages=stages))
    # 20 steps each, the last micro-batch one pass of the other stages later than the first
    assert outcome.duration_s == pytest.approx(STEP_S * (20 + (stages - 1) / stages))
    busy = sum(part.num_busy_s for part in outcome.replicas)
    assert busy == pytest.approx(20 * STEP_S)


def test_one_request_leaves_the_other_stages_idle() -> None:
    outcome = run(at_once(1), replica(num_stages=4))
    assert outcome.duration_s == pytest.approx(20 * STEP_S)
    assert outcome.replicas[0].num_busy_s == pytest.approx(20 * STEP_S / 4)


def test_attention_groups_step_together() -> None:
    outcome = run(at_once(4), replica(num_groups=4))
    assert {result.finished_s for result in outcome.requests} == {outcome.duration_s}
    assert outcome.duration_s == pytest.approx(20 * STEP_S)
    late = [*at_once(1), SimulatedRequest(at_s=STEP_S / 2, num_prompt=4, num_output=1)]
    second = run(late, replica(num_groups=2)).requests[1]
    assert second.started_s == pytest.approx(STEP_S)  # it waits for the round under way


def two_models(**more: object) -> ReplicaConfig:
    lane = LaneConfig(model="b", scheduler=make(slots=4), step_times=ConstantStepTimes(2 * STEP_S))
    return replica(model="a", further=(lane,), **more)


def test_steps_of_two_models_take_turns() -> None:
    both = [*at_once(2, "a"), *at_once(2, "b")]
    outcome = run(both, two_models())
    assert outcome.duration_s == pytest.approx(20 * 3 * STEP_S)
    assert outcome.replicas[0].num_busy_s == pytest.approx(outcome.duration_s)
    alone = run(at_once(2, "a"), two_models())
    assert alone.duration_s == pytest.approx(20 * STEP_S)
    models = summarise(outcome, Slo.parse("tpot:30")).models
    assert models["a"].num_served == models["b"].num_served == 2
    assert models["a"].attainment == 0.0  # a step of each is 36 ms


def test_requests_go_where_their_model_is() -> None:
    both = [*at_once(6, "a"), *at_once(6, "b")]
    outcome = run(both, two_models(), replica(model="a"))
    used = {(result.request.model, result.replica) for result in outcome.requests}
    assert used == {("a", 0), ("a", 1), ("b", 0)}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_resumed_requests_are_not_generated_again(stages: int, fast_forward: bool) -> None:
    load = [SimulatedRequest(at_s=0.05 * i, num_prompt=9, num_output=100) for i in range(40)]
    fleet = [replica(make(slots=8), num_stages=stages)] * 3
    faults = FaultModel(mtbf_s=1.0, repair_s=0.3)
    runs = {
        resume: run(load, *fleet, faults=faults, seed=3, resume=resume, fast_forward=fast_forward)
        for resume in (False, True)
    }
    restarted, resumed = runs[False], runs[True]
    assert summarise(restarted, None).resumed_tokens == 0
    assert summarise(restarted, None).num_restarts > 10
    assert summarise(resumed, None).resumed_tokens > 100
    assert resumed.area < 0.8 * restarted.area
    assert all(result.num_resumed < 100 for result in resumed.requests)


def test_what_a_replica_generated_does_not_depend_on_the_fast_path() -> None:
    load = [SimulatedRequest(at_s=0.0517 * i, num_prompt=9, num_output=100) for i in range(20)]
    faults = FaultModel(mtbf_s=1.0, repair_s=0.3)
    fleet = [replica(step_times=ConstantStepTimes(0.0123457))] * 2  # no two events coincide
    fast, slow = (
        run(load, *fleet, faults=faults, seed=5, resume=True, fast_forward=way)
        for way in (True, False)
    )
    assert [r.num_resumed for r in fast.requests] == [r.num_resumed for r in slow.requests]
    assert fast.duration_s == pytest.approx(slow.duration_s)


def test_disaggregated_requests_resume_through_both_pools() -> None:
    load = [SimulatedRequest(at_s=0.03 * i, num_prompt=9, num_output=100) for i in range(30)]
    cached = replica(make(slots=8, cache=True))
    outcome = run(
        load,
        cached,
        decode=(cached,) * 2,
        faults=FaultModel(mtbf_s=1.0, repair_s=0.2),
        seed=1,
        resume=True,
    )
    assert summarise(outcome, None).resumed_tokens > 20


def test_memory_is_divided_by_need_and_by_wish() -> None:
    h100 = find_accelerator("h100-sxm")
    models = [build_replica(load_planning_spec(n), h100) for n in ("llama-3.1-8b", "qwen2.5-7b")]
    open_shares = divide_memory(models, MemoryLimits(), (None, None))
    assert sum(open_shares) == pytest.approx(UTILIZATION)
    assert open_shares[0] - open_shares[1] == pytest.approx(
        (models[0].resident_bytes - models[1].resident_bytes) / h100.memory_bytes, abs=0.02
    )
    given = divide_memory(models, MemoryLimits(), (None, 0.3))
    assert given == pytest.approx([UTILIZATION - 0.3, 0.3])
    large = build_replica(load_planning_spec("qwen3-32b"), h100)
    with pytest.raises(DoesNotFit, match="together do not fit"):
        divide_memory([*models, large], MemoryLimits(), (None, None, None))


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_pipeline_agrees_with_predict_at_a_steady_load(capsys: pytest.CaptureFixture[str]) -> None:
    point = OperatingPoint(
        model="llama-3.1-8b", device="l40s", pp=4, isl=512, osl=256, batch=32, backend=None
    )
    expected = predict(point)
    found = simulated(
        capsys,
        *("llama-3.1-8b", "--accelerator", "l40s", "--pipeline-parallel-size", "4"),
        *("--input-len", "512", "--output-len", "256", "--num-prompts", "120"),
        *("--request-rate", str(expected.output_tok_s / 256)),
    )
    tpot = found["tpot"]["mean"] * 1000  # type: ignore[index]
    assert math.log(tpot / expected.tpot_ms) == pytest.approx(0, abs=0.15)


FURTHER = """
[[model]]
model = "qwen2.5-7b"
rate = 4
isl = 256
osl = 32
"""


def test_models_of_a_file_share_the_fleet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FURTHER + "replicas = 1\n")
    words = ("llama-3.1-8b", "--accelerator", "h100-sxm", "--replicas", "2", "--request-rate", "8")
    more = ("--num-prompts", "200", "--input-len", "256", "--output-len", "32")
    alone = simulated(capsys, *words, *more)
    both = simulated(capsys, *words, *more, "--further-models", str(path))
    models = both["models"]
    assert set(models) == {"llama-3.1-8b", "qwen2.5-7b"}  # type: ignore[call-overload]
    assert models["qwen2.5-7b"]["request_rate"] == pytest.approx(4, rel=0.25)  # type: ignore[index]
    assert both["tpot"]["mean"] > alone["tpot"]["mean"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--further-models", "FILE", "--pipeline-parallel-size", "2"), "stages"),
        (("--further-models", "FILE", "--replicas", "1", "--autoscale", "3"), "one size"),
        (("--further-models", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_what_does_not_go_together_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FURTHER + "replicas = 1\n")
    named = [str(path) if word == "FILE" else word for word in words]
    assert main(["simulate", "llama-3.1-8b", "--accelerator", "l40s", *named]) == 2
    assert reason in capsys.readouterr().err


def test_model_of_too_many_replicas_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FURTHER + "replicas = 3\n")
    with pytest.raises(BadInput, match="more replicas than there are"):
        ridgeline.simulate("llama-3.1-8b", accelerator="l40s", further_models=path)
