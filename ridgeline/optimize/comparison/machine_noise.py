"""How steady the machine was, from step times of several runs of one configuration.

Steps differ because they carry different work; runs of one configuration should not differ beyond
that. So step time is regressed on what a step carried (a constant, its sequences, its new tokens,
its cached tokens), and each run is summarised as measured over fitted time. The remaining variation
from run to run is the machine: a neighbour, the clock, throttling. A staircase cannot detect it (it
locks onto whatever the first runs found), so the interval of a comparison includes it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from ridgeline.optimize.quality.text_comparison import Array
from ridgeline.records import RunTrace, StepStat

MIN_STEPS = 20  # per run, for a usable estimate


def machine_noise(runs: Sequence[RunTrace]) -> float:
    """Standard deviation, from run to run, of the logarithm of speed at equal work.

    Zero if it cannot be estimated: fewer than two runs with step records.
    """
    steps_by_run = [[step for step in run.steps if step.shapes and step.run_s > 0] for run in runs]
    steps_by_run = [steps for steps in steps_by_run if len(steps) >= MIN_STEPS]
    if len(steps_by_run) < 2:
        return 0.0
    fitted = _fit([step for steps in steps_by_run for step in steps])
    slowness = [
        math.log(sum(step.run_s for step in steps) / max(1e-12, float(_rows(steps) @ fitted)))
        for steps in map(tuple, steps_by_run)
    ]
    return statistics.stdev(slowness)


def _features(step: StepStat) -> tuple[float, float, float, float]:
    return 1.0, len(step.shapes), step.num_tokens, sum(cached for _, cached in step.shapes)


def _rows(steps: Sequence[StepStat]) -> Array:
    total: Array = np.array([_features(step) for step in steps]).sum(0)
    return total


def _fit(steps: Sequence[StepStat]) -> Array:
    """Least squares on relative errors; returns the four coefficients."""
    times = np.array([step.run_s for step in steps])
    rows = np.array([_features(step) for step in steps]) / times[:, None]
    scale = np.abs(rows).max(0)
    coefficients, *_ = np.linalg.lstsq(rows / scale, np.ones(len(times)), rcond=None)
    return np.asarray(coefficients / scale)
