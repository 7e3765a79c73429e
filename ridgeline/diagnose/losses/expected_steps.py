"""Expected step time on this machine, fitted to an earlier run of the same model.

    t = (a + b runs + c tokens + d cached tokens) * f(kind), no coefficient negative

The coefficients are fitted by least squares on relative errors, without the slowest 5 % of the
steps, which other processes may have disturbed. Four terms cannot describe every kernel: a step of
three sequences may take the kernel path of one or of eight. Therefore f is the median of measured
over fitted time among the steps of one kind, and `noise` is how far the earlier run's own steps
exceeded their expectation. A step within that noise is not called slow, because it also occurred in
a healthy run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from ridgeline.diagnose.losses.latency_losses import EXPECTED_NOISE, Expected
from ridgeline.diagnose.losses.step_facts import between
from ridgeline.records import StepStat
from ridgeline.roofline import phase_of
from ridgeline.stats import percentile

LEAST_STEPS = 20
LEAST_OF_A_KIND = 8
USUAL_PERCENTILE = 80  # of the earlier run's measured over expected times; it becomes `noise`

_Kind = tuple[bool, int]
_Terms = tuple[float, float, float, float]
Seconds = Callable[[StepStat], float]


def learn(steps: Sequence[StepStat]) -> Expected | None:
    """Fit the expected step times to recorded steps. None if there are too few."""
    used = [step for step in steps if step.shapes and step.run_s > 0]
    if len(used) < LEAST_STEPS:
        return None
    coefficients = _fit_coefficients(used)

    def fitted(step: StepStat) -> float:
        return sum(x * y for x, y in zip(coefficients, _terms(step), strict=True))

    kinds = defaultdict[_Kind, list[float]](list)
    for step in used:
        kinds[_kind(step)].append(_over(step, fitted))
    factors = {kind: median(over) for kind, over in kinds.items() if len(over) >= LEAST_OF_A_KIND}

    def seconds(step: StepStat) -> float:
        return fitted(step) * factors.get(_kind(step), 1.0)

    usual = percentile([_over(step, seconds) for step in used], USUAL_PERCENTILE)
    return Expected(seconds=seconds, noise=max(EXPECTED_NOISE, usual), between_s=sum(between(used)))


def _fit_coefficients(used: Sequence[StepStat]) -> _Terms:
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array([_terms(step) for step in used])
    taken_s = np.array([step.run_s for step in used])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    inliers = np.ones(len(used), dtype=bool)
    solution = np.zeros(rows.shape[1])
    for _ in range(2):
        relative = rows[inliers] / scale / taken_s[inliers, None]
        solution, _ = nnls(relative, np.ones(int(inliers.sum())))
        over = taken_s / np.maximum(rows / scale @ solution, 1e-9)
        inliers = over <= np.quantile(over, 0.95)
    step_s, run_s, token_s, cached_s = (float(x) for x in solution / scale)
    return step_s, run_s, token_s, cached_s


def _over(step: StepStat, seconds: Seconds) -> float:
    return step.run_s / max(seconds(step), 1e-9)


def _kind(step: StepStat) -> _Kind:
    """Group decode steps by sequences and other steps by tokens: 1, 2, 3, 4, 5-8, 9-16, …"""
    decode = phase_of(step) == "decode"
    size = len(step.shapes) if decode else step.num_tokens
    return decode, size if size <= 4 else 3 + (size - 1).bit_length()


def _terms(step: StepStat) -> _Terms:
    cached = sum(cached for _, cached in step.shapes)
    return 1.0, float(len(step.shapes)), float(step.num_tokens), float(cached)
