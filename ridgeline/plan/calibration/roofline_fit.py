"""A step-time model with four terms, fitted to measured steps.

    t = alpha · max(bytes / bandwidth, flops / peak) + a + b · runs + c · tokens

The first term is the roofline bound of the step's work, from the spec; alpha is the kernels'
distance from it: at least 1, because no step beats its bound (less only if measured steps did).
Without this floor a step's work, which grows with its tokens, could be mistaken for overhead. The
other terms are overhead: per step, per run (tables, sampling, events) and per token. A rewrite of
the spec (INT8, for example) changes the first term only, so the model also predicts when smaller
weights do not pay.

Fitted by non-negative least squares on relative errors, so that short decode steps weigh as much as
long prefill steps. Source: the step-time models compared in docs/guides/optimize-engine.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import nnls

MIN_STEPS = 8  # fewer samples do not determine the terms


class StepSample(msgspec.Struct, frozen=True):
    """One measured step: its bound, its size, and the seconds it took."""

    bound_s: float
    num_runs: int
    num_tokens: int
    seconds: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted terms: `alpha` times the bound; overhead in seconds per step, run and token."""

    alpha: float
    step_s: float
    run_s: float
    token_s: float

    def seconds(self, bound_s: float, num_runs: int, num_tokens: int) -> float:
        """Predicted seconds of a step."""
        overhead_s = self.step_s + self.run_s * num_runs + self.token_s * num_tokens
        return self.alpha * bound_s + overhead_s


def fit_step_time(samples: Sequence[StepSample]) -> StepTime | None:
    """The best fit, or None if there are fewer than `MIN_STEPS` samples.

    The slowest 5 % are excluded: page faults and interference do not predict other steps.
    """
    if len(samples) < MIN_STEPS:
        return None
    typical = np.array([(s.bound_s, 1.0, s.num_runs, s.num_tokens) for s in samples])
    taken_s = np.array([s.seconds for s in samples])
    per_work = taken_s / (typical @ np.array([1.0, 1e-4, 1e-5, 1e-6]))
    kept = per_work <= np.quantile(per_work, 0.95)
    chosen = typical[kept]
    # If every step has the same number of runs (one request at a time), the costs of a run and of a
    # step cannot be separated; a wrong split would predict that batching does not pay.
    identifiable = np.array([True, True, bool(np.ptp(chosen[:, 2]) > 0), True])
    floor = min(1.0, float(np.quantile(taken_s[kept] / np.maximum(chosen[:, 0], 1e-12), 0.05)))
    rows = (chosen / taken_s[kept, None])[:, identifiable]
    seconds = 1 - floor * rows[:, 0]
    scale = np.abs(rows).max(axis=0)
    solution, _ = nnls(rows / scale, seconds)
    terms = np.zeros(4)
    terms[identifiable] = solution / scale
    alpha, step_s, run_s, token_s = terms.tolist()
    return StepTime(alpha=floor + alpha, step_s=step_s, run_s=run_s, token_s=token_s)
