"""What a step should take on this machine, learnt from an earlier run of the same model.

    t = (a + b runs + c tokens + d cached tokens) * f(kind), none of them negative

Fitted to the earlier run's steps by least squares on relative errors, without the slowest
twentieth, which met somebody else. Four terms cannot follow every kernel: a step of three
sequences may take the path of one or that of eight. Hence f, the median of measured over fitted
among the steps of one kind, and `noise`, by how much the earlier run's own steps exceed what was
learnt from them: a step within that is not called slow, since it occurred when all was well.
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
USUAL_PERCENTILE = (
    80  # of the earlier run's steps, which took at most `noise` times what is expected
)

_Kind = tuple[bool, int]
_Terms = tuple[float, float, float, float]
Seconds = Callable[[StepStat], float]


def learn(steps: Sequence[StepStat]) -> Expected | None:
    """None where there are too few steps to learn from."""
    used = [step for step in steps if step.shapes and step.run_s > 0]
    if len(used) < LEAST_STEPS:
        return None
    per_term = _fitted(used)

    def fitted(step: StepStat) -> float:
        return sum(x * y for x, y in zip(per_term, _terms(step), strict=True))

    kinds = defaultdict[_Kind, list[float]](list)
    for step in used:
        kinds[_kind(step)].append(_over(step, fitted))
    factors = {kind: median(over) for kind, over in kinds.items() if len(over) >= LEAST_OF_A_KIND}

    def seconds(step: StepStat) -> float:
        return fitted(step) * factors.get(_kind(step), 1.0)

    usual = percentile([_over(step, seconds) for step in used], USUAL_PERCENTILE)
    return Expected(seconds=seconds, noise=max(EXPECTED_NOISE, usual), between_s=sum(between(used)))


def _fitted(used: Sequence[StepStat]) -> _Terms:
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array([_terms(step) for step in used])
    taken_s = np.array([step.run_s for step in used])
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    kept = np.ones(len(used), dtype=bool)
    found = np.zeros(rows.shape[1])
    for _ in range(2):
        found, _ = nnls(rows[kept] / scale / taken_s[kept, None], np.ones(int(kept.sum())))
        over = taken_s / np.maximum(rows / scale @ found, 1e-9)
        kept = over <= np.quantile(over, 0.95)
    step_s, run_s, token_s, cached_s = (float(x) for x in found / scale)
    return step_s, run_s, token_s, cached_s


def _over(step: StepStat, seconds: Seconds) -> float:
    return step.run_s / max(seconds(step), 1e-9)


def _kind(step: StepStat) -> _Kind:
    """Decode steps by their sequences, others by tokens; one by one to four, then doubling."""
    decode = phase_of(step) == "decode"
    size = len(step.shapes) if decode else step.num_tokens
    return decode, size if size <= 4 else 3 + (size - 1).bit_length()


def _terms(step: StepStat) -> _Terms:
    cached = sum(cached for _, cached in step.shapes)
    return 1.0, float(len(step.shapes)), float(step.num_tokens), float(cached)
