"""Measures the configuration that the user has, within the budget of the search.

A server that starts or answers slowly may use up the budget here. Then the baseline is that which
was measured in time; there are no trials, and the result says what one would take.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import ceil

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, Inconclusive
from ridgeline.measure.goodput_search import GoodputResult
from ridgeline.optimize.comparison.load_runner import LoadRunner, staircase_start
from ridgeline.optimize.comparison.objective import JudgedRun
from ridgeline.optimize.environment import Deployment
from ridgeline.optimize.job import OptimizeJob, RunningConfiguration
from ridgeline.optimize.time_budget import OutOfTimeError, TimeBudget
from ridgeline.optimize.trial_checks import CandidateChecks

SEARCH_PROBES = 8
LOWER_STARTS = 3

Open = Callable[[Settings], tuple[Deployment, ExitStack]]


async def measure_baseline(
    job: OptimizeJob,
    budget: TimeBudget,
    runner: LoadRunner,
    checks: CandidateChecks,
    open_settings: Open,
) -> tuple[RunningConfiguration, list[JudgedRun]]:
    """The baseline at its best load, and every run that was made to find it.

    Raises BadInput as soon as the budget is known to be too small for it and one trial, and
    Inconclusive if the budget ends before there is a run.
    """
    reached = "its start"
    try:
        deployment, stack = open_settings(job.settings)
        reached = "its first answers"
        async with runner.in_time():
            answer_s = await checks.time_one_answer(deployment)
            reached = "--eval-cmd on it"
            await checks.try_user_evaluation(deployment)
        budget.choose_window(answer_s)
        budget.note_run(budget.window_s + answer_s)
        if budget.left_s < budget.smallest_s:
            raise _hopeless(budget)
        low, reached = 0.4 / max(answer_s, 1e-3), "its first run"
        result, runs = await _first_load(runner, deployment, low)
    except OutOfTimeError:
        raise Inconclusive(
            f"no rung was tried: the budget ended during {reached}, before there was a baseline",
            value=f"{budget.total_s:.0f} s",
            fix="give a longer --budget, or try on a machine that is less busy",
        ) from None
    rate = staircase_start(result, low)
    budget.note_baseline(rate)
    baseline = RunningConfiguration(
        label="baseline",
        settings=job.settings,
        deployment=deployment,
        stack=stack,
        rate=rate,
        runs=_nearest_run(runs, rate),
        settled=result.best is not None and result.failed_load is not None,
    )
    return baseline, runs


async def _first_load(
    runner: LoadRunner, deployment: Deployment, low: float
) -> tuple[GoodputResult, list[JudgedRun]]:
    """Find the baseline's load. If its first load fails, start lower: one disturbed run is no
    verdict.
    """
    result, runs = await _search(runner, deployment, low)
    for number in range(1, LOWER_STARTS):
        if result.best is not None:
            break
        try:
            result, more = await _search(runner, deployment, low / 3**number)
        except OutOfTimeError:
            break
        runs += more
    return result, runs


async def _search(
    runner: LoadRunner, deployment: Deployment, low: float
) -> tuple[GoodputResult, list[JudgedRun]]:
    return await runner.search(deployment, low, SEARCH_PROBES, "searching its load")


def _hopeless(budget: TimeBudget) -> BadInput:
    needed_s = budget.spent_s + 1.5 * budget.smallest_s
    return BadInput(
        "the budget is too small to measure a baseline and one rung",
        value=f"{budget.total_s:.0f} s",
        limit=f"about {needed_s:.0f} s for this model on this machine",
        fix=f"--budget {ceil(needed_s / 60)}m" if needed_s > 90 else f"--budget {ceil(needed_s)}s",
    )


def _nearest_run(runs: list[JudgedRun], rate: float) -> tuple[JudgedRun, ...]:
    """The run whose load is closest to `rate`, preferably one that met the SLO."""
    held = [judged for judged in runs if judged.holds] or runs
    best = min(held, key=lambda judged: abs(judged.rate - rate))
    return (best,)
