"""Two configurations, measured in alternation until a difference is sure or the rounds are over.

Each round runs both under the same seed, in the order A B, B A, A B, …: what the round has in
common and a linear drift of the machine cancel in its ratio.

Under which load? Goodput at one fixed load hides a difference (both carry it) or exaggerates it
(one collapses). So each side first *approaches* its own knee, until one run has held the SLO and
one has not, and then climbs a staircase around it, as psychophysics finds a threshold: a run that
held raises that side's load, one that did not lowers it twice as far, by steps that shrink; it
settles where two runs in three hold (Kaernbach's weighted up-down method, 1991). Below the knee two
unequal configurations look alike, so nothing is decided before both sides have been on both sides
of theirs. Beyond it goodput collapses within a few percent of load, so a run that missed counts as
at most the step down that it causes. For the objective `latency` both stay at one common load.

The rounds of a staircase are not independent: in simulations of equal and unequal servers
Student's interval was a quarter too narrow, which `WIDEN` makes up for. And a staircase locks
onto whatever its first runs found, so that a machine whose speed wanders from run to run would be
taken for a difference; how much it wandered is read off the step times (`noise.py`) and added to
the interval. tests/optimize/test_paired_comparison.py holds both to the truth.

Time is saved where the outcome is clear. A candidate that misses four fifths of the incumbent's
load twice, while the incumbent keeps it in between, has lost without rounds. Rounds end when no
number of them would decide, and they need not learn their scatter from themselves alone
(`runner.Spread`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.optimize.comparison.load_runner import LoadRunner, OutOfTimeError
from ridgeline.optimize.comparison.machine_noise import machine_noise
from ridgeline.optimize.comparison.objective import JudgedRun
from ridgeline.optimize.comparison.outcome import INTERIM_LEVEL, WORTHWHILE, outcome_of
from ridgeline.optimize.environment import Deployment
from ridgeline.optimize.time_budget import MIN_ROUNDS
from ridgeline.stats import (
    LEVEL,
    Interval,
    Outcome,
    Prior,
    add_log_error,
    ratio_interval,
    student_t,
)

FIRST_STEP = 0.10  # upwards, of the logarithm of the load
LEAST_STEP = 0.03
SHRINK = 0.8
DOWN = 2.0  # a step down is this many steps up
APPROACH = 1.2  # first factor of the approach; each next one is larger
MAX_APPROACH = 6
WIDEN = 1.3
BEATEN = 0.8  # of the rival's load: who misses that twice while the rival keeps it has lost
KNEE_RUNS = 3.0  # that decide where a staircase settles


class PairedComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What the rounds gave. `ratio` is after/before, more is better; None under three rounds.

    `beaten_at`: the load that the second side missed twice and the first kept in between.
    """

    before: tuple[JudgedRun, ...]
    after: tuple[JudgedRun, ...]
    log_ratios: tuple[float, ...]
    ratio: Interval | None
    outcome: Outcome
    before_rate: float
    after_rate: float
    beaten_at: float | None = None


class LoadStaircase:
    """One side's load: up after a run that held, down after one that did not."""

    def __init__(self, rate: float, step: float = FIRST_STEP) -> None:
        self.rate, self._step = rate, step

    def learn(self, held: bool) -> None:
        self.rate *= math.exp(self._step if held else -DOWN * self._step)
        self._step = max(self._step * SHRINK, LEAST_STEP) if self._step else 0.0


class ComparisonSide:
    """A configuration: its deployment, its staircase, its readings.

    `fixed`: its load stays as it is. `settled`: it starts at its knee and need not approach it.
    """

    def __init__(
        self,
        name: str,
        deployment: Deployment,
        rate: float,
        *,
        fixed: bool = False,
        settled: bool = False,
    ) -> None:
        self.name, self.deployment, self.settled = name, deployment, settled or fixed
        self.stairs = LoadStaircase(rate, 0.0 if fixed else FIRST_STEP)
        self.readings: list[JudgedRun] = []
        self.approached: list[JudgedRun] = []
        self.fixed = fixed

    @property
    def crossed(self) -> bool:
        """Has been both below and above its knee since the rounds began."""
        return self.fixed or len({reading.holds for reading in self.readings}) == 2

    @property
    def bracketed(self) -> bool:
        """Has been both below and above its knee at all."""
        seen = {reading.holds for reading in (*self.approached, *self.readings)}
        return self.settled or len(seen) == 2

    @property
    def rising(self) -> bool:
        """Kept its promise in every round: its knee lies higher, nobody knows how much. (One
        disturbed run of the approach can make a staircase begin far too low.)
        """
        return not self.fixed and all(reading.holds for reading in self.readings)

    async def approach(
        self, runner: LoadRunner, *, closing: bool, rival: ComparisonSide | None = None
    ) -> float | None:
        """From wherever it starts to about its knee: up while runs hold, down while they do not.

        Returns the load at which it was clearly beaten by its `rival`, which ends the comparison.
        """
        if self.settled:
            return None
        rates: dict[bool, float] = {}
        rate, factor = self.stairs.rate, APPROACH
        for _ in range(MAX_APPROACH):
            doing = f"finding the load of the {self.name}"
            seed = runner.fresh_seed()
            reading = await runner.run(self.deployment, rate, seed, doing, closing=closing)
            self.approached.append(reading)
            if rival is not None and not reading.holds and rate <= BEATEN * rival.stairs.rate:
                if await self._is_beaten(runner, rate, rival):
                    return rate
                rival = None  # close enough for rounds
            rates[reading.holds] = rate
            if len(rates) == 2:
                break
            rate = rate * factor if reading.holds else rate / factor
            factor **= 1.5
        self.stairs.rate = math.sqrt(rates[True] * rates[False]) if len(rates) == 2 else rate
        return None

    async def _is_beaten(self, runner: LoadRunner, rate: float, rival: ComparisonSide) -> bool:
        """Whether the rival holds a load that this side has just missed, and misses again."""
        seed, doing = runner.fresh_seed(), "a load far below the incumbent's"
        held = await runner.run(rival.deployment, rate, seed, f"{doing}, {rival.name}")
        if not held.holds:
            return False
        again = await runner.run(self.deployment, rate, seed, f"{doing}, {self.name}")
        self.approached.append(again)
        return not again.holds


async def compare_in_rounds(
    runner: LoadRunner,
    before: ComparisonSide,
    after: ComparisonSide,
    *,
    max_rounds: int,
    closing: bool = False,
) -> PairedComparison:
    """Alternate two sides. Ends early only when sure (the closing never), or out of time."""
    try:
        await before.approach(runner, closing=closing)
        rival = before if before.settled and not closing else None
        beaten_at = await after.approach(runner, closing=closing, rival=rival)
        if beaten_at is not None:
            return _early_loss(before, after, beaten_at)
        for number in range(max_rounds):
            order = (before, after) if number % 2 == 0 else (after, before)
            await _round(runner, order, f"round {number + 1} of {max_rounds}", closing)
            if number + 1 >= MIN_ROUNDS and not closing:
                prior = runner.spread.prior
                if _is_decided(before, after, prior) or _cannot_be_decided(
                    before, after, prior, max_rounds
                ):
                    break
    except OutOfTimeError:
        pass  # whole rounds that were measured stand
    found = _conclude(before, after, runner.spread.prior)
    runner.spread.note(found.log_ratios)
    return found


async def _round(
    runner: LoadRunner, order: tuple[ComparisonSide, ComparisonSide], doing: str, closing: bool
) -> None:
    """Both sides once under one seed; a round that is cut in its middle leaves no trace."""
    if not runner.budget.affords_runs(2, closing=closing):
        raise OutOfTimeError
    seed = runner.fresh_seed()
    readings = [
        await runner.run(
            side.deployment, side.stairs.rate, seed, f"{doing}, {side.name}", closing=closing
        )
        for side in order
    ]
    for side, reading in zip(order, readings, strict=True):
        side.readings.append(reading)
        side.stairs.learn(reading.holds)


def _log_ratios(a: ComparisonSide, b: ComparisonSide) -> tuple[float, ...]:
    pairs = zip(a.readings, b.readings, strict=True)
    return tuple(math.log(after.score / before.score) for before, after in pairs)


def _resolution(a: ComparisonSide, b: ComparisonSide) -> float:
    """The least difference that rounds of this size can show: about one request in each run."""
    pairs = zip(a.readings, b.readings, strict=True)
    sizes = [math.hypot(before.resolution, after.resolution) for before, after in pairs]
    return sum(sizes) / len(sizes)


def _interval(a: ComparisonSide, b: ComparisonSide, level: float, prior: Prior) -> Interval:
    """The ratio b/a from the rounds, widened by what the machine itself wandered."""
    rounds = ratio_interval(
        _log_ratios(a, b), level=level, least_sd=_resolution(a, b), widen=WIDEN, prior=prior
    )
    return add_log_error(rounds, math.hypot(_drift_error(a), _drift_error(b)))


def _drift_error(side: ComparisonSide) -> float:
    """Standard error of a knee that `KNEE_RUNS` runs decide, on a machine that is not steady."""
    runs = [reading.run for reading in (*side.approached, *side.readings)]
    return machine_noise(runs) / math.sqrt(KNEE_RUNS)


def _is_decided(a: ComparisonSide, b: ComparisonSide, prior: Prior) -> bool:
    """A difference at 99 %, or, at 95 %, no gain worth having: giving up early misleads nobody."""
    if a.bracketed and b.bracketed:
        early = _outcome(a, b, _interval(a, b, INTERIM_LEVEL, prior))
        if early in ("improved", "regressed"):
            return True
    return a.crossed and b.crossed and outcome_of(_interval(a, b, LEVEL, prior)) == "unchanged"


def _outcome(a: ComparisonSide, b: ComparisonSide, ratio: Interval) -> Outcome:
    """The judgement of the interval, unless the loser still rises: it may yet come up."""
    found = outcome_of(ratio)
    loser = {"improved": a, "regressed": b}.get(found)
    return "inconclusive" if loser is not None and loser.rising else found


def _cannot_be_decided(a: ComparisonSide, b: ComparisonSide, prior: Prior, max_rounds: int) -> bool:
    """Whether the rounds that are left could not decide, should they go on as they went so far."""
    now, count = _interval(a, b, LEVEL, prior), len(a.readings)
    mid, half = math.log(now.mid), math.log(now.high / now.mid)
    freedom = prior.freedom
    less = student_t(LEVEL, max_rounds + freedom) / student_t(LEVEL, count + freedom)
    reach = half * less * math.sqrt(count / max_rounds)
    gains, loses = mid - reach > 0, mid + reach < 0
    return not gains and not loses and mid + reach > math.log(1 + WORTHWHILE)


def _early_loss(a: ComparisonSide, b: ComparisonSide, rate: float) -> PairedComparison:
    return PairedComparison(
        before=(),
        after=tuple(b.approached),
        log_ratios=(),
        ratio=None,
        outcome="regressed",
        before_rate=a.stairs.rate,
        after_rate=rate,
        beaten_at=rate,
    )


def _conclude(a: ComparisonSide, b: ComparisonSide, prior: Prior) -> PairedComparison:
    logs = _log_ratios(a, b)
    ratio = _interval(a, b, LEVEL, prior) if len(logs) >= MIN_ROUNDS else None
    return PairedComparison(
        before=tuple(a.readings),
        after=tuple(b.readings),
        log_ratios=logs,
        ratio=ratio,
        outcome=_outcome(a, b, ratio) if ratio else "inconclusive",
        before_rate=_final_rate(a),
        after_rate=_final_rate(b),
    )


def _final_rate(side: ComparisonSide) -> float:
    """The load that a side ended at: where the next comparison of it begins."""
    return _mean_rate(side.readings) if len(side.readings) >= MIN_ROUNDS else side.stairs.rate


def _mean_rate(readings: Sequence[JudgedRun]) -> float:
    last = readings[-MIN_ROUNDS:]
    return math.exp(sum(math.log(reading.rate) for reading in last) / len(last))
