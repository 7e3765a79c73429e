"""What the search predicts for a twin, from what its clients saw: more slots are worth a trial."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ridgeline.config.settings import Settings
from ridgeline.engine.build import make_scheduler
from ridgeline.engine.scheduler import Scheduler
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.modelspec.cost import cost_model
from ridgeline.optimize.environment import Load, arrival_times_s
from ridgeline.optimize.external.inferred_steps import infer_steps
from ridgeline.optimize.ladder import candidates_of, load_default_ladder
from ridgeline.optimize.ranking.predictor import Predictor
from ridgeline.plan.simulate.single import Arrival, simulate
from ridgeline.records import RunTrace, Slo, StepStat
from ridgeline.twin.build import plan_twin, resolved_settings, step_times_of
from ridgeline.twin.config import TwinConfig
from ridgeline.workflows.configuration_costs import StepBounds
from ridgeline.workflows.optimize.simulator import SimulatedEngine
from ridgeline.workflows.targets import catalogue_peaks

MODEL, DEVICE, SLOTS = "llama-3.1-8b", "h100-sxm", 4
KNEE = 6.5  # req/s that four slots serve


def config_of(settings: Settings) -> TwinConfig:
    return TwinConfig(model=MODEL, device=DEVICE, max_num_seqs=settings.max_num_seqs)


def scheduler_of(settings: Settings) -> Scheduler:
    model = plan_twin(config_of(settings))
    return make_scheduler(resolved_settings(config_of(settings), model, model.replica.spec))


def requests(number: int, seed: int) -> list[LoadRequest]:
    return [
        LoadRequest(
            id=str(i), kind="x", prompt=tuple(range(1000 * i, 1000 * i + 512)), max_tokens=64
        )
        for i in range(number)
    ]


def seen_by_clients(settings: Settings, load: Load) -> RunTrace:
    """A run of the twin without its record of steps."""
    times_s = arrival_times_s(load)
    arrivals = [
        Arrival(at_s=at_s, prompt=tuple(request.prompt), num_output=request.max_tokens)  # type: ignore[arg-type]  # tokens
        for at_s, request in zip(times_s, requests(len(times_s), 0), strict=True)
    ]
    config = config_of(settings)
    times = step_times_of(config, plan_twin(config).replica)
    run = simulate(
        scheduler_of(settings), arrivals, times.step_s, end_s=load.window_s + load.grace_s
    )
    return RunTrace(
        target="twin",
        workload="w",
        arrivals="poisson",
        seed=0,
        started_unix_s=0.0,
        duration_s=run.duration_s,
        requests=run.requests,
    )


class TwinItself:
    """A simulator that is right."""

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None: ...

    def run(self, settings: Settings, load: Load) -> RunTrace:
        return seen_by_clients(settings, load)


def load_at(rate: float) -> Load:
    return Load(rate=rate, seed=3, window_s=4.0, grace_s=2.0)


@pytest.mark.slow
def test_gains_of_more_slots_are_predicted_as_the_twin_has_them() -> None:
    start, ladder = Settings(model=MODEL, max_num_seqs=SLOTS), load_default_ladder()
    peaks = catalogue_peaks(DEVICE, "bfloat16")[1]
    cost = cost_model(plan_twin(config_of(start)).replica.spec)
    simulator = SimulatedEngine(
        lambda settings: StepBounds(model=cost, peaks=peaks), scheduler_of, requests
    )
    slo = Slo.parse("ttft:500 tpot:50")
    predictor = Predictor(simulator, slo, "goodput", ladder.weights, load_at)
    for share in (0.7, 1.2):
        run = seen_by_clients(start, load_at(share * KNEE))
        predictor.learn_steps(start, infer_steps(run, start))
    rung = next(rung for rung in ladder.rungs if rung.id == "batch-limit")
    twin = Predictor(TwinItself(), slo, "goodput", ladder.weights, load_at)
    gains = {}
    for candidate in candidates_of(rung, start, {}):
        predicted, real = (p.forecast(start, candidate, KNEE) for p in (predictor, twin))
        assert predicted.predicted_gain == pytest.approx(real.predicted_gain, rel=0.1)
        gains[candidate.settings.max_num_seqs] = predicted.predicted_gain
    assert gains[2] < 0.7
    assert gains[8] > 1.7
    assert gains[16] > 3
