"""The protocol of comparison on a simulated server: right on average, honest about its error."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import msgspec
import pytest

from ridgeline.config.settings import Settings
from ridgeline.optimize.comparison.load_runner import LoadRunner
from ridgeline.optimize.comparison.machine_noise import machine_noise
from ridgeline.optimize.comparison.paired_comparison import (
    ComparisonSide,
    LoadStaircase,
    PairedComparison,
    compare_in_rounds,
)
from ridgeline.optimize.environment import Load
from ridgeline.optimize.result_builder import _judge_no_gain, _judge_quality
from ridgeline.optimize.time_budget import TimeBudget
from ridgeline.records import Slo
from ridgeline.records.progress import silent
from ridgeline.stats import Interval
from tests.optimize.simulated_servers import Fake, Physics, Quirks, SimulatedDeployment, simulate


def runner(fake: Fake, seed: int, objective: str = "goodput", total_s: float = 1e9) -> LoadRunner:
    budget = TimeBudget(total_s, fake.clock)
    budget.window_s = 2.5
    return LoadRunner(
        slo=Slo.parse("ttft:500 tpot:50"),
        objective=objective,  # type: ignore[arg-type]
        budget=budget,
        observer=silent,
        seed=1000 * seed,
        longest_output=24,
    )


async def fight(
    seed: int,
    speed: float,
    *,
    noise: float = 0.03,
    objective: str = "goodput",
    start: float = 1.0,
    rounds: int = 6,
) -> PairedComparison:
    """A against B, which is `speed` times as fast."""
    fake = Fake()
    settings = Settings(batching="continuous", max_num_seqs=16)
    other = Settings(batching="continuous", max_num_seqs=16, seed=1)
    a = SimulatedDeployment(fake, settings, Quirks(noise=noise))
    b = SimulatedDeployment(fake, other, Quirks(noise=noise, speed=speed))
    sides = (
        ComparisonSide("a", a, 30.0, fixed=objective == "latency"),
        ComparisonSide("b", b, 30.0 * start, fixed=objective == "latency"),
    )
    return await compare_in_rounds(runner(fake, seed, objective), *sides, max_rounds=rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "start"), [(1.2, 1.0), (1.5, 1.2)])
async def test_the_ratio_is_unbiased_and_its_interval_covers_the_truth(
    speed: float, start: float
) -> None:
    comparisons = [await fight(seed, speed, start=start) for seed in range(12)]
    ratios = [comparison.ratio for comparison in comparisons if comparison.ratio is not None]
    assert len(ratios) == 12
    assert statistics.fmean(r.mid for r in ratios) == pytest.approx(speed, rel=0.05)
    covered = sum(r.low <= speed <= r.high for r in ratios)
    assert covered >= 10


@pytest.mark.slow
async def test_equal_servers_are_hardly_ever_called_unequal() -> None:
    outcomes = [(await fight(seed, 1.0)).outcome for seed in range(14)]
    assert sum(outcome in ("improved", "regressed") for outcome in outcomes) <= 2


@pytest.mark.slow
async def test_a_clear_gain_is_found_in_few_rounds() -> None:
    comparisons = [await fight(seed, 1.5) for seed in range(4)]
    assert all(comparison.outcome == "improved" for comparison in comparisons)
    assert statistics.fmean(len(comparison.log_ratios) for comparison in comparisons) < 5.5


@pytest.mark.slow
async def test_noise_is_called_noise() -> None:
    """A machine whose speed wanders by 20 % from run to run must not be taken for a gain."""
    outcomes = [(await fight(seed, 1.0, noise=0.2)).outcome for seed in range(60)]
    assert sum(outcome in ("improved", "regressed") for outcome in outcomes) <= 6
    assert outcomes.count("inconclusive") >= 36


async def test_side_that_met_the_slo_in_every_round_is_not_settled() -> None:
    fake = Fake()
    settings = Settings(batching="continuous", max_num_seqs=16)
    sides = [
        ComparisonSide(name, SimulatedDeployment(fake, settings, Quirks()), rate, settled=True)
        for name, rate in (("a", 200.0), ("b", 2.0))
    ]
    found = await compare_in_rounds(runner(fake, 3), *sides, max_rounds=3, closing=True)
    assert (found.before_settled, found.after_settled) == (True, False)


async def test_latency_is_compared_at_equal_load() -> None:
    found = await fight(1, 1.3, objective="latency")
    assert {judged.rate for judged in (*found.before, *found.after)} == {30.0}
    assert found.ratio is not None
    assert found.ratio.low > 1.1


async def test_rounds_alternate_and_share_their_seed() -> None:
    fake, order = Fake(), []

    class Watched(SimulatedDeployment):
        async def run(self, load, on_finish=None):  # type: ignore[no-untyped-def]
            order.append((self._settings.seed, load.seed))
            return await super().run(load, on_finish)

    sides = [
        ComparisonSide(name, Watched(fake, Settings(seed=i), Quirks()), 5.0, settled=True)
        for i, name in enumerate("ab")
    ]
    await compare_in_rounds(runner(fake, 0), sides[0], sides[1], max_rounds=4, closing=True)
    assert [who for who, _ in order] == [0, 1, 1, 0, 0, 1, 1, 0]
    seeds = [seed for _, seed in order]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4


@pytest.mark.slow
async def test_what_seems_to_gain_gets_more_rounds_than_equals() -> None:
    gains = [await fight(seed, 1.12, rounds=5) for seed in (0, 3)]
    assert all(5 < len(found.log_ratios) <= 8 for found in gains)
    assert any(found.outcome == "improved" for found in gains)
    equal = await fight(0, 1.0, rounds=5)
    assert len(equal.log_ratios) <= 5


async def test_round_beyond_the_time_budget_is_not_started() -> None:
    fake = Fake()
    place = runner(fake, 0, total_s=60.0)
    sides = [
        ComparisonSide(name, SimulatedDeployment(fake, Settings(), Quirks()), 5.0, settled=True)
        for name in "ab"
    ]
    found = await compare_in_rounds(place, sides[0], sides[1], max_rounds=100)
    assert len(found.before) == len(found.after) > 3
    assert fake.clock.now_s < 60


def test_the_machine_noise_is_read_off_the_step_times() -> None:
    load = Load(rate=20.0, seed=1, window_s=2.5, grace_s=2.0)
    runs = [
        simulate(Physics(), Settings(), msgspec.structs.replace(load, seed=seed, rate=rate), speed)
        for seed, rate, speed in ((1, 10.0, 1.0), (2, 20.0, 1.1), (3, 30.0, 0.9))
    ]
    steady = [simulate(Physics(), Settings(), load, 1.0) for _ in range(3)]
    assert machine_noise(runs) == pytest.approx(0.1, rel=0.2)
    assert machine_noise(steady) < 1e-6
    assert machine_noise(runs[:1]) == 0.0


def test_a_staircase_falls_twice_as_far_as_it_rises() -> None:
    up, down = LoadStaircase(10.0), LoadStaircase(10.0)
    up.learn(True)
    down.learn(False)
    assert (up.rate / 10) ** 2 == pytest.approx(10 / down.rate)


async def test_a_clear_loser_needs_no_rounds() -> None:
    fake = Fake()
    settled = SimulatedDeployment(fake, Settings(batching="continuous", max_num_seqs=16), Quirks())
    slow = SimulatedDeployment(fake, Settings(batching="continuous", seed=1), Quirks(speed=0.4))
    found = await compare_in_rounds(
        runner(fake, 3),
        ComparisonSide("a", settled, 30.0, settled=True),
        ComparisonSide("b", slow, 30.0),
        max_rounds=6,
    )
    assert found.outcome == "regressed" and not found.log_ratios
    assert found.beaten_at is not None and found.beaten_at <= 0.8 * 30.0


@pytest.mark.slow
async def test_equals_are_never_beaten_in_the_approach() -> None:
    for seed in range(20):
        fake = Fake()
        sides = [
            ComparisonSide(
                name,
                SimulatedDeployment(fake, Settings(seed=i), Quirks(noise=0.05)),
                30.0,
                settled=not i,
            )
            for i, name in enumerate("ab")
        ]
        found = await compare_in_rounds(runner(fake, seed), sides[0], sides[1], max_rounds=3)
        assert found.beaten_at is None


@pytest.mark.slow
async def test_variance_of_earlier_comparisons_is_a_valid_prior() -> None:
    """Climbs of many comparisons, each on its runner: intervals from shared scatter still cover the
    truth, nine in ten of them at least (of a single search's fourteen 79 % do now and then)."""
    covered, rounds, num_searches, num_duels = 0, [], 5, 14
    for search in range(num_searches):
        fake = Fake()
        place = runner(fake, 7 + search)
        for seed in range(num_duels):
            seeds = (0, 1 + seed)
            settings = [Settings(batching="continuous", max_num_seqs=16, seed=s) for s in seeds]
            a, b = (SimulatedDeployment(fake, setting, Quirks(noise=0.03)) for setting in settings)
            found = await compare_in_rounds(
                place, ComparisonSide("a", a, 30.0), ComparisonSide("b", b, 30.0), max_rounds=6
            )
            assert found.ratio is not None
            covered += found.ratio.low <= 1.0 <= found.ratio.high
            rounds.append(len(found.log_ratios))
        assert place.spread.prior.freedom == place.spread.MOST
    assert covered >= 0.9 * num_searches * num_duels, covered
    assert statistics.fmean(rounds) < 6, "none ended before its last round"


async def test_low_starting_rate_does_not_decide_a_comparison() -> None:
    """What one disturbed run of an approach can do: every round held, so nothing is known."""
    fake = Fake()
    settings = Settings(batching="continuous", max_num_seqs=16)
    a, b = (SimulatedDeployment(fake, settings, Quirks(noise=0.03)) for _ in range(2))
    knee = (await fight(0, 1.0)).before_rate
    sides = (
        ComparisonSide("a", a, knee, settled=True),
        ComparisonSide("b", b, 0.4 * knee, settled=True),
    )
    found = await compare_in_rounds(runner(fake, 1), *sides, max_rounds=4)
    assert all(judged.holds for judged in found.after)
    assert found.ratio is not None and found.ratio.high < 1
    assert found.outcome == "inconclusive"
    assert _judge_no_gain(found)[1].endswith("still rising: its knee is unknown")


def test_change_without_effect_is_reported_as_such() -> None:
    def reason(low: float, high: float) -> str:
        ratio = Interval(low=low, mid=1.0, high=high, level=0.95)
        rates = {"before_rate": 1.0, "after_rate": 1.0}
        return _judge_no_gain(
            PairedComparison(
                before=(), after=(), log_ratios=(), ratio=ratio, outcome="unchanged", **rates
            )
        )[1]

    assert reason(0.98, 1.03).startswith("no effect")
    assert reason(0.9997, 1.004).endswith("between 0% and +0.4%")
    assert "no effect" not in reason(0.85, 1.03)


@pytest.mark.parametrize(
    ("low", "words"),
    [(1.12, "at least +12%"), (1.004, "at least +0.4%"), (1.0002, "certain to be")],
)
def test_gain_is_never_said_to_be_nothing(low: float, words: str) -> None:
    """A trial is kept for a gain, which whole percents round to nothing where it is small."""
    candidate = SimpleNamespace(rung=SimpleNamespace(honesty="exact"))
    evidence = SimpleNamespace(quality=None, forecast=SimpleNamespace(candidate=candidate))
    ratio = Interval(low=low, mid=1.2, high=1.4, level=0.95)
    assert words in _judge_quality(ratio, evidence)[1]  # type: ignore[arg-type]
