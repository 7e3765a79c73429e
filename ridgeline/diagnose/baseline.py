"""What a step should take on this machine, learnt from an earlier run of the same model.

    t = a + b runs + c tokens + d cached tokens, none of them negative

Fitted to the earlier run's steps by least squares on relative errors, without the slowest
twentieth, which met somebody else. Four terms cannot follow every kernel; hence the margin that a
step must exceed before it is called slow (blame.EXPECTED_NOISE).
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.diagnose.blame import ExpectedSeconds
from ridgeline.records import StepStat

LEAST_STEPS = 20


def learn(steps: Sequence[StepStat]) -> ExpectedSeconds | None:
    """None where there are too few steps to learn from."""
    used = [step for step in steps if step.shapes and step.run_s > 0]
    if len(used) < LEAST_STEPS:
        return None
    import numpy as np
    from scipy.optimize import nnls  # type: ignore[import-untyped, unused-ignore]

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
    per_term = [float(x) for x in found / scale]
    return lambda step: sum(x * y for x, y in zip(per_term, _terms(step), strict=True))


def _terms(step: StepStat) -> tuple[float, float, float, float]:
    cached = sum(cached for _, cached in step.shapes)
    return 1.0, float(len(step.shapes)), float(step.num_tokens), float(cached)
