"""Two configurations measured in alternation until the difference is certain or the rounds end.

Each round runs both under the same seed, in the order A B, B A, A B, …: what a round has in common,
and a linear drift of the machine, cancel in its ratio.

The load. Goodput at one fixed load hides a difference (both carry it) or exaggerates it (one
collapses). So each side first approaches its own knee, until one run has met the SLO and one has
not, and then follows a staircase around it, as psychophysics finds a threshold: a run that met the
SLO raises that side's load, one that missed it lowers the load twice as far, in shrinking steps. It
settles where two runs in three succeed (weighted up-down method, Kaernbach 1991). Below the knee
two unequal configurations look alike, so nothing is decided before both sides have been above and
below theirs. Above it goodput collapses within a few percent of load, so a run that missed counts
as the best load up to its own that its side is known to hold. With the objective `latency` both
sides stay at one common load.

Limits of a verdict. A candidate that met the SLO in no round is not faster. A side that met it
in every round may have its knee higher: it is not called slower, unless the other side is better by
more than the next step up.

A busy machine. A round during which other work took the CPU is void and repeated; if the machine
stays busy, the comparison ends without a verdict.

The interval. Rounds of a staircase are not independent: in simulations of equal and unequal servers
Student's interval was a quarter too narrow, which `WIDEN` corrects. And a staircase locks onto
whatever its first runs found, so a machine whose speed drifts from run to run would be mistaken for
a difference; the drift is estimated from step times (machine_noise.py) and added to the interval.
tests/optimize/test_paired_comparison.py checks the coverage of both.

Early ends. A candidate that twice misses the SLO at four fifths of the incumbent's load, while the
incumbent meets it in between, has lost without rounds. Rounds end when no number of them would
decide, and their variance estimate also uses earlier comparisons (`RoundVariance`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.optimize.comparison.load_runner import (
    BUSY_REPEATS,
    LoadRunner,
    MachineBusyError,
)
from ridgeline.optimize.comparison.machine_noise import machine_noise
from ridgeline.optimize.comparison.objective import JudgedRun, credit_held_loads
from ridgeline.optimize.comparison.outcome import INTERIM_LEVEL, WORTHWHILE, outcome_of
from ridgeline.optimize.environment import Deployment
from ridgeline.optimize.time_budget import MIN_ROUNDS, OutOfTimeError
from ridgeline.stats import (
    LEVEL,
    Interval,
    Outcome,
    Prior,
    add_log_error,
    ratio_interval,
    student_t,
)

FIRST_STEP = 0.10  # first step up, in the logarithm of the load
MIN_STEP = 0.03
SHRINK = 0.8
DOWN = 2.0  # a step down, in steps up
APPROACH = 1.2  # first factor of the approach; later ones are larger
MAX_APPROACH = 6
WIDEN = 1.3
BEATEN = 0.8  # share of the rival's load; missing it twice while the rival meets it is a loss
SAME_LOAD = 0.15  # logarithm of the ratio of two loads below which rounds begin at one load
EXTRA_ROUNDS = 3  # for a gain that the usual ones leave inconclusive
EXTRA_LEVEL = 0.975  # of the last look after them: they are further looks at a promising side
KNEE_RUNS = 3.0  # runs that determine where a staircase settles


class PairedComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the rounds. `ratio` is after/before, more is better; None with fewer than three
    rounds.

    `busy_share`: the share of the CPU that other work took, if that ended the comparison without a
    verdict. `beaten_at`: the load at which the second side missed the SLO twice and the first met
    it in between. `before_settled`, `after_settled`: whether the side missed the SLO in some round,
    so that it ended near its knee.
    """

    before: tuple[JudgedRun, ...]
    after: tuple[JudgedRun, ...]
    log_ratios: tuple[float, ...]
    ratio: Interval | None
    outcome: Outcome
    before_rate: float
    after_rate: float
    beaten_at: float | None = None
    busy_share: float | None = None
    before_settled: bool = True
    after_settled: bool = True


class LoadStaircase:
    """A side's load: up after a run that met the SLO, twice as far down after one that did not.

    Steps shrink from the first run that missed it on.
    """

    def __init__(self, rate: float, step: float = FIRST_STEP) -> None:
        self.rate, self._step = rate, step
        self._crossed = False

    @property
    def next_factor(self) -> float:
        """The load after a run that meets the SLO, relative to the load of that run."""
        return math.exp(self._step)

    def learn(self, held: bool) -> None:
        self.rate *= math.exp(self._step if held else -DOWN * self._step)
        self._crossed |= not held
        if self._step and self._crossed:
            self._step = max(self._step * SHRINK, MIN_STEP)


class ComparisonSide:
    """One side of a comparison: its deployment, its staircase, its runs.

    `fixed`: its load does not change. `settled`: it starts at its knee and needs no approach.
    `like_rival`: its knee is expected near the rival's, so it starts there without an approach.
    """

    def __init__(
        self,
        name: str,
        deployment: Deployment,
        rate: float,
        *,
        fixed: bool = False,
        settled: bool = False,
        like_rival: bool = False,
    ) -> None:
        self.name, self.deployment, self.settled = name, deployment, settled or fixed
        self.like_rival = like_rival
        self.stairs = LoadStaircase(rate, 0.0 if fixed else FIRST_STEP)
        self.runs: list[JudgedRun] = []
        self.approach_runs: list[JudgedRun] = []
        self.fixed = fixed

    @property
    def scored_runs(self) -> tuple[JudgedRun, ...]:
        """Its rounds as they count: those that missed the SLO by a load that it can hold."""
        return credit_held_loads(self.runs, self.approach_runs)

    @property
    def crossed(self) -> bool:
        """Whether its rounds include runs both above and below its knee."""
        return self.fixed or len({judged.holds for judged in self.runs}) == 2

    @property
    def bracketed(self) -> bool:
        """Whether its rounds or its approach include runs both above and below its knee."""
        outcomes = {judged.holds for judged in (*self.approach_runs, *self.runs)}
        return self.settled or len(outcomes) == 2

    @property
    def rising(self) -> bool:
        """Whether it met the SLO in every round, so that its knee is at an unknown higher load.

        One disturbed run during the approach can make a staircase start far too low.
        """
        return not self.fixed and all(judged.holds for judged in self.runs)

    def is_near(self, rival: ComparisonSide) -> bool:
        """Whether both sides start at loads that an approach cannot tell apart."""
        distance = abs(math.log(self.stairs.rate / rival.stairs.rate))
        return not self.fixed and distance < SAME_LOAD

    async def approach(
        self, runner: LoadRunner, *, closing: bool, rival: ComparisonSide | None = None
    ) -> float | None:
        """Move from the initial load to about the knee: up while runs meet the SLO, down while they
        miss it.

        Returns the load at which it clearly lost to its `rival`, which ends the comparison; else
        None.
        """
        if self.settled or (self.like_rival and rival is not None):
            return None
        rates: dict[bool, float] = {}
        rate, factor = self.stairs.rate, APPROACH
        for _ in range(MAX_APPROACH):
            doing = f"finding the load of the {self.name}"
            judged = await runner.run_quiet(self.deployment, rate, doing, closing=closing)
            self.approach_runs.append(judged)
            if rival is not None and not judged.holds and rate <= BEATEN * rival.stairs.rate:
                if await self._is_beaten(runner, rate, rival):
                    return rate
                rival = None  # close enough to decide by rounds
            rates[judged.holds] = rate
            if len(rates) == 2:
                break
            rate = rate * factor if judged.holds else rate / factor
            factor **= 1.5
        self.stairs.rate = math.sqrt(rates[True] * rates[False]) if len(rates) == 2 else rate
        return None

    async def _is_beaten(self, runner: LoadRunner, rate: float, rival: ComparisonSide) -> bool:
        """Whether the rival meets the SLO at a load at which this side misses it twice."""
        doing = "a load far below the incumbent's"
        rival_run = await runner.run_quiet(rival.deployment, rate, f"{doing}, {rival.name}")
        if not rival_run.holds:
            return False
        again = await runner.run_quiet(self.deployment, rate, f"{doing}, {self.name}")
        self.approach_runs.append(again)
        return not again.holds


async def compare_in_rounds(
    runner: LoadRunner,
    before: ComparisonSide,
    after: ComparisonSide,
    *,
    max_rounds: int,
    closing: bool = False,
) -> PairedComparison:
    """Alternate two sides. Stops early only when certain (never in the closing), or out of time."""
    busy_share = None
    number, last = 0, max_rounds
    try:
        await before.approach(runner, closing=closing)
        rival = before if before.settled and not closing else None
        beaten_at = await after.approach(runner, closing=closing, rival=rival)
        if beaten_at is not None:
            return _early_loss(before, after, beaten_at)
        if after.is_near(before):
            after.stairs.rate = before.stairs.rate
        while number < last:
            order = (before, after) if number % 2 == 0 else (after, before)
            await _round(runner, order, f"round {number + 1} of {last}", closing)
            number += 1
            if number >= MIN_ROUNDS and not closing:
                prior = runner.spread.prior
                last = _last_round(before, after, prior, max_rounds)
                if _is_decided(before, after, prior) or _cannot_be_decided(
                    before, after, prior, last
                ):
                    break
    except OutOfTimeError:
        pass  # complete rounds remain valid
    except MachineBusyError as error:
        busy_share = error.share
    final_level = LEVEL if number <= max_rounds else EXTRA_LEVEL
    result = _conclude(before, after, runner.spread.prior, final_level)
    runner.spread.note(result.log_ratios)
    if busy_share is not None and result.outcome == "inconclusive":
        return msgspec.structs.replace(result, busy_share=busy_share)
    return result


async def _round(
    runner: LoadRunner, order: tuple[ComparisonSide, ComparisonSide], doing: str, closing: bool
) -> None:
    """Run both sides once under one seed. A round that is interrupted leaves no trace.

    A round that other work disturbed is repeated under another seed: the prompts of this one are in
    the prefix cache. Raises MachineBusyError, OutOfTimeError.
    """
    for repeat in range(1 + BUSY_REPEATS):
        if not runner.budget.affords_runs(2, closing=closing):
            raise OutOfTimeError
        seed, runs = runner.fresh_seed(), []
        for side in order:
            what = f"{doing}, {side.name}"
            rate = side.stairs.rate
            runs.append(await runner.run(side.deployment, rate, seed, what, closing=closing))
            if runner.is_disturbed(runs[-1]):
                break
        if not runner.is_disturbed(runs[-1]):
            break
        runner.report_busy(runs[-1].busy_share)
        if repeat == BUSY_REPEATS:
            raise MachineBusyError(runs[-1].busy_share)
    for side, judged in zip(order, runs, strict=True):
        side.runs.append(judged)
        side.stairs.learn(judged.holds)


def _log_ratios(a: ComparisonSide, b: ComparisonSide) -> tuple[float, ...]:
    pairs = zip(a.scored_runs, b.scored_runs, strict=True)
    return tuple(math.log(after.score / before.score) for before, after in pairs)


def _resolution(a: ComparisonSide, b: ComparisonSide) -> float:
    """The smallest difference that rounds of this size can show: about one request per run."""
    pairs = zip(a.runs, b.runs, strict=True)
    sizes = [math.hypot(before.resolution, after.resolution) for before, after in pairs]
    return sum(sizes) / len(sizes)


def _interval(a: ComparisonSide, b: ComparisonSide, level: float, prior: Prior) -> Interval:
    """The ratio b/a over the rounds, widened by the drift of the machine."""
    rounds = ratio_interval(
        _log_ratios(a, b), level=level, least_sd=_resolution(a, b), widen=WIDEN, prior=prior
    )
    return add_log_error(rounds, math.hypot(_drift_error(a), _drift_error(b)))


def _drift_error(side: ComparisonSide) -> float:
    """Standard error of a knee located by `KNEE_RUNS` runs on a machine whose speed drifts."""
    runs = [judged.trace for judged in (*side.approach_runs, *side.runs)]
    return machine_noise(runs) / math.sqrt(KNEE_RUNS)


def _is_decided(a: ComparisonSide, b: ComparisonSide, prior: Prior) -> bool:
    """Whether there is a difference at 99 %, or no worthwhile gain at 95 %.

    Stopping early on "no gain" needs less certainty because it keeps the incumbent.
    """
    if a.bracketed and b.bracketed:
        early = _outcome(a, b, _interval(a, b, INTERIM_LEVEL, prior))
        if early in ("improved", "regressed"):
            return True
    return a.crossed and b.crossed and outcome_of(_interval(a, b, LEVEL, prior)) == "unchanged"


def _outcome(a: ComparisonSide, b: ComparisonSide, ratio: Interval) -> Outcome:
    """The outcome of the interval, unless the rounds do not support it."""
    outcome = outcome_of(ratio)
    if outcome == "improved":
        if not any(judged.holds for judged in b.runs):
            return "inconclusive"
        if a.rising and ratio.low <= a.stairs.next_factor:
            return "inconclusive"
    if outcome == "regressed" and b.rising:
        return "inconclusive"
    return outcome


def _last_round(a: ComparisonSide, b: ComparisonSide, prior: Prior, max_rounds: int) -> int:
    """`EXTRA_ROUNDS` more for a side that seems to gain, as far as the budget has time for them.

    They cost less than the trial of another rung, most of all in short budgets. Looks before
    the last one stay at 99 %.
    """
    seems_to_gain = _interval(a, b, LEVEL, prior).mid > 1 + WORTHWHILE / 2
    return max_rounds + EXTRA_ROUNDS if seems_to_gain else max_rounds


def _cannot_be_decided(a: ComparisonSide, b: ComparisonSide, prior: Prior, max_rounds: int) -> bool:
    """Whether the remaining rounds could not decide if they continued like the ones so far.

    Those of a side that met the SLO in every round do not: its load is still rising.
    """
    if b.rising and not a.rising:
        return False
    now, count = _interval(a, b, LEVEL, prior), len(a.runs)
    mid, half = math.log(now.mid), math.log(now.high / now.mid)
    freedom = prior.freedom
    less = student_t(LEVEL, max_rounds + freedom) / student_t(LEVEL, count + freedom)
    reach = half * less * math.sqrt(count / max_rounds)
    gains, loses = mid - reach > 0, mid + reach < 0
    return not gains and not loses and mid + reach > math.log(1 + WORTHWHILE)


def _early_loss(a: ComparisonSide, b: ComparisonSide, rate: float) -> PairedComparison:
    return PairedComparison(
        before=(),
        after=tuple(b.approach_runs),
        log_ratios=(),
        ratio=None,
        outcome="regressed",
        before_rate=a.stairs.rate,
        after_rate=rate,
        beaten_at=rate,
    )


def _conclude(
    a: ComparisonSide, b: ComparisonSide, prior: Prior, final_level: float
) -> PairedComparison:
    """The interval at `LEVEL`, and the outcome: a gain or a loss has to hold at `final_level`."""
    logs = _log_ratios(a, b)
    ratio: Interval | None = None
    outcome: Outcome = "inconclusive"
    if len(logs) >= MIN_ROUNDS:
        ratio = _interval(a, b, LEVEL, prior)
        outcome = _outcome(a, b, ratio)
        if outcome in ("improved", "regressed"):
            outcome = _outcome(a, b, _interval(a, b, final_level, prior))
    return PairedComparison(
        before=a.scored_runs,
        after=b.scored_runs,
        log_ratios=logs,
        ratio=ratio,
        outcome=outcome,
        before_rate=_final_rate(a),
        after_rate=_final_rate(b),
        before_settled=not a.rising,
        after_settled=not b.rising,
    )


def _final_rate(side: ComparisonSide) -> float:
    """The load at which a side ended; its next comparison starts there."""
    return _mean_rate(side.runs) if len(side.runs) >= MIN_ROUNDS else side.stairs.rate


def _mean_rate(runs: Sequence[JudgedRun]) -> float:
    last = runs[-MIN_ROUNDS:]
    return math.exp(sum(math.log(judged.rate) for judged in last) / len(last))
