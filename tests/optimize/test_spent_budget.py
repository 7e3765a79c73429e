"""Servers too slow for the budget: the search ends with it, and says what a trial takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.config.settings import Settings, settings_from
from ridgeline.errors import BadInput, Inconclusive
from ridgeline.measure.client.load_client import LoadOptions, OnFinish
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.drivers import shell
from ridgeline.optimize.environment import Deployment, Environment, Load, UserEvaluation
from ridgeline.optimize.external import server_deployment
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.ladder import Ladder
from ridgeline.optimize.output.headline import headline
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.result_builder import TrialEvidence
from ridgeline.optimize.search import optimize
from ridgeline.optimize.search_state import STATE_FILE, StateFile
from ridgeline.optimize.time_budget import OutOfTimeError, limited, time_left_s
from ridgeline.records import RunTrace, Slo
from tests.optimize.simulated_servers import (
    NAIVE,
    Clock,
    Fake,
    FakeOracle,
    Quirks,
    SimulatedDeployment,
)
from tests.optimize.test_search import only
from tests.simulation.virtual_time import VirtualLoop

BUDGET_S, SOON_S = 240.0, 6.0


class LoopClock(Clock):
    """The clock of the event loop. Time that a deployment adds passes when it awaits `passed`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._begun_s, self._owed_s = loop, loop.now_s, 0.0

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self._loop.now_s - self._begun_s

    @now_s.setter
    def now_s(self, value: float) -> None:
        self._owed_s += value - self.now_s

    def block(self, seconds: float) -> None:
        self._loop.now_s += seconds

    async def passed(self, more_s: float = 0.0) -> None:
        owed_s, self._owed_s = self._owed_s + more_s, 0.0
        await asyncio.sleep(owed_s)


class SlowServers(Fake):
    """Fake servers whose delays are those of the test.

    `start_s`: how long the start of the n-th configuration takes; `run_s`: by how much the n-th run
    ends later than it should; `answer_s`: how much longer greedy answers take.
    """

    start_s: Callable[[int], float] = staticmethod(lambda number: 5.0)
    run_s: Callable[[int], float] = staticmethod(lambda number: 0.0)
    answer_s = 0.0
    evaluation: UserEvaluation | None = None
    oracle: Callable[[SlowServers], FakeOracle] | None = None
    num_starts = num_runs = 0

    def environment(self) -> Environment:
        usual = super().environment()
        simulator = usual.simulator if self.oracle is None else self.oracle(self)
        return msgspec.structs.replace(usual, evaluation=self.evaluation, simulator=simulator)

    @contextmanager
    def _open(self, settings: Any) -> Iterator[Deployment]:
        self.num_starts += 1
        clock = self.clock
        assert isinstance(clock, LoopClock)
        stop_s = clock.now_s + self.start_s(self.num_starts)
        while clock.now_s < stop_s:
            clock.block(1.0)
            shell.sleep_unless_interrupted(0.0)
        yield SlowDeployment(self, settings, Quirks())


class SlowDeployment(SimulatedDeployment):
    _fake: SlowServers

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        self._fake.num_runs += 1
        run = await super().run(load, on_finish)
        await self._clock.passed(self._fake.run_s(self._fake.num_runs))
        return run

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        answers = await super().greedy(prompts, max_tokens)
        await self._clock.passed(self._fake.answer_s)
        return answers

    @property
    def _clock(self) -> LoopClock:
        assert isinstance(self._fake.clock, LoopClock)
        return self._fake.clock


def search(
    rungs: Ladder | None = None,
    state: StateFile | None = None,
    budget_s: float = BUDGET_S,
    **delays: Any,
) -> tuple[LadderResult | Exception, float, SlowServers]:
    """The result or the error of a search, its seconds, and the servers."""
    loop = VirtualLoop(random.Random(1))
    try:
        servers = SlowServers(clock=LoopClock(loop))
        for name, delay in delays.items():
            setattr(servers, name, delay)
        job = OptimizeJob(
            settings=settings_from({"model": "demo", **NAIVE}),
            workload="equal requests",
            slo=Slo.parse("ttft:500 tpot:50"),
            objective="goodput",
            budget_s=budget_s,
            price=MachinePrice(),
        )
        ladder = rungs or only("continuous-batching")
        work = optimize(job, servers.environment(), ladder, clock=servers.clock, state=state)
        try:
            found: LadderResult | Exception = loop.run_until_complete(work)
        except (Inconclusive, BadInput) as error:
            found = error
        return found, servers.clock.now_s, servers
    finally:
        loop.close()


def test_usual_servers_are_searched_within_the_budget() -> None:
    found, took_s, _ = search()
    assert isinstance(found, LadderResult) and found.decided
    assert took_s <= BUDGET_S


@pytest.mark.parametrize(
    ("delays", "during"),
    [
        ({"start_s": lambda number: 1e4}, "its start"),
        ({"answer_s": 1e4}, "its first answers"),
        ({"run_s": lambda number: 1e4}, "its first run"),
    ],
)
def test_baseline_that_takes_longer_than_the_budget_ends_with_it(
    delays: dict[str, Any], during: str
) -> None:
    found, took_s, _ = search(**delays)
    assert isinstance(found, Inconclusive)
    assert f"no rung was tried: the budget ended during {during}" in str(found)
    assert "240 s" in str(found)
    assert BUDGET_S - 1 <= took_s <= BUDGET_S + SOON_S


@pytest.mark.parametrize("delays", [{"start_s": lambda number: 1e4}, {"answer_s": 1e4}])
def test_resumed_search_whose_server_is_too_slow_keeps_what_is_known(
    tmp_path: Path, delays: dict[str, Any]
) -> None:
    first, _, _ = search(state=StateFile(tmp_path))
    assert isinstance(first, LadderResult) and first.kept
    spent_s = msgspec.json.decode((tmp_path / STATE_FILE).read_bytes())["budget"]["spent_s"]
    found, took_s, _ = search(
        state=StateFile(tmp_path, resume=True), budget_s=spent_s + 60.0, **delays
    )
    assert isinstance(found, LadderResult)
    assert found.ended == "budget spent" and found.kept == first.kept
    assert [trial.ratio for trial in found.trials] == [trial.ratio for trial in first.trials]
    assert "the total was not measured" in headline(found)
    assert took_s <= 60.0 + SOON_S


def test_evaluation_of_the_user_ends_with_the_budget() -> None:
    async def run(deployment: Deployment) -> float | None:
        await asyncio.sleep(1e4)
        return 1.0

    found, took_s, _ = search(evaluation=UserEvaluation(run=run))
    assert isinstance(found, Inconclusive) and "--eval-cmd" in str(found)
    assert took_s <= BUDGET_S + SOON_S


def test_baseline_without_time_for_a_trial_is_a_result_without_one() -> None:
    """Runs of a busy machine take four times as long as they should."""
    found, took_s, servers = search(run_s=lambda number: 16.0)
    assert isinstance(found, LadderResult)
    assert headline(found).startswith("No rung was tried: a trial takes ")
    assert (found.ended, found.trials, found.decided) == ("budget spent", (), False)
    assert found.baseline.measured.num_requests > 0
    assert servers.num_starts == 1
    assert took_s <= BUDGET_S + SOON_S


def test_run_that_never_ends_leaves_the_baseline_of_those_before_it() -> None:
    found, took_s, _ = search(run_s=lambda number: 0.0 if number < 3 else 1e4)
    assert isinstance(found, LadderResult)
    assert headline(found).startswith("No rung was tried: a trial takes ")
    assert found.baseline.measured.num_requests > 0
    assert BUDGET_S - 1 <= took_s <= BUDGET_S + SOON_S


@pytest.mark.parametrize("delays", [{"start_s": lambda number: 1e4 if number == 2 else 5.0}])
def test_candidate_that_does_not_start_leaves_time_for_the_closing_comparison(
    delays: dict[str, Any],
) -> None:
    found, took_s, _ = search(**delays)
    assert isinstance(found, LadderResult)
    [trial] = found.trials
    assert (trial.verdict, found.decided) == ("cut short", False)
    assert trial.reason == "the budget ended before it was measured"
    assert headline(found).startswith("No rung came to a verdict: a trial takes ")
    missed = headline(msgspec.structs.replace(found, slo_holds=False))
    assert missed.startswith("The SLO was not met: ")
    assert "; no rung came to a verdict: a trial takes " in missed
    assert took_s <= BUDGET_S


def test_trial_that_ends_in_its_quality_check_was_measured() -> None:
    forecast: Any = None
    evidence = TrialEvidence(forecast, begun_s=0.0)
    evidence.failed(OutOfTimeError(), "")
    assert evidence.failure == ("cut short", "the budget ended before it was measured")
    comparison: Any = object()
    evidence.comparison = comparison
    evidence.failed(OutOfTimeError(), "")
    assert evidence.failure == ("cut short", "the budget ended before its quality was known")


def test_waits_outside_of_a_search_have_no_limit() -> None:
    assert time_left_s() == float("inf")
    shell.sleep_unless_interrupted(0.0)
    with limited(lambda: 0.0), pytest.raises(OutOfTimeError):
        shell.sleep_unless_interrupted(0.0)
    assert time_left_s() == float("inf")


def test_warm_up_takes_a_share_of_the_time_that_is_left() -> None:
    usual = server_deployment._warm_up_options(1, 0.0)
    assert usual == LoadOptions(num_requests=server_deployment.WARMUP_REQUESTS, seed=1)
    with limited(lambda: 200.0):
        short = server_deployment._warm_up_options(1, 5.0)
    assert short.duration_s is not None
    assert short.duration_s + short.grace_s == pytest.approx(20.0)


@pytest.mark.parametrize(("left_s", "takes_s"), [(80.0, 30.0), (20.0, 20.0)])
def test_warm_up_before_the_closing_has_the_time_that_it_took_before(
    left_s: float, takes_s: float
) -> None:
    with limited(lambda: left_s):
        options = server_deployment._warm_up_options(1, 30.0)
    assert options.duration_s is not None
    assert options.duration_s + options.grace_s == pytest.approx(takes_s)


class SlowOracle(FakeOracle):
    """A simulator that takes a minute per run."""

    def __init__(self, servers: SlowServers) -> None:
        super().__init__(servers.physics)
        self.servers = servers

    def run(self, settings: Settings, load: Load) -> RunTrace:
        assert isinstance(self.servers.clock, LoopClock)
        self.servers.clock.block(60.0)
        return super().run(settings, load)


def test_simulation_takes_no_time_of_trials() -> None:
    """Without time for a second run of the simulator, the rung is tried without a prediction."""
    found, took_s, _ = search(oracle=SlowOracle)
    assert isinstance(found, LadderResult)
    assert [trial.verdict for trial in found.trials] == ["kept"]
    assert found.trials[0].predicted.note
    assert took_s <= BUDGET_S
