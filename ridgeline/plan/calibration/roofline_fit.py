"""How long one engine step takes, as a model with four terms that are fitted to measured steps.

    t = alpha · max(bytes / bandwidth, flops / peak) + a + b · runs + c · tokens

The first term is the roofline of the step's own work, from the spec; alpha is how far from the
roof the kernels are: at least 1, for no step beats its roof (less only where measured ones did).
Without that floor a step's work, which grows with its tokens, could be taken for overhead. The
other three are overhead: per step, per run (tables, sampling, events) and per token. Rewriting the
spec (INT8, say) moves the first term and leaves the others, which is why a prediction made with it
also tells when a smaller weight will not pay.

Fitted by non-negative least squares on relative errors, so that short decode steps weigh as much
as long prefill steps. Source of the form: the step-time models compared in docs/guides/optimize-engine.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import nnls

LEAST_STEPS = 8  # under which a fit says nothing


class StepSample(msgspec.Struct, frozen=True):
    """One measured step: its bound, its size, and the seconds it took."""

    bound_s: float
    num_runs: int
    num_tokens: int
    seconds: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted terms; see the module's head. Units: seconds."""

    alpha: float
    step_s: float
    run_s: float
    token_s: float

    def seconds(self, bound_s: float, num_runs: int, num_tokens: int) -> float:
        """Predicted seconds of a step."""
        overhead_s = self.step_s + self.run_s * num_runs + self.token_s * num_tokens
        return self.alpha * bound_s + overhead_s


def fit_step_time(samples: Sequence[StepSample]) -> StepTime | None:
    """The best fit, or None where there are too few samples to say anything.

    The slowest twentieth is left out: a step that met a page fault or a neighbour's burst says
    nothing about the next one.
    """
    if len(samples) < LEAST_STEPS:
        return None
    typical = np.array([(s.bound_s, 1.0, s.num_runs, s.num_tokens) for s in samples])
    taken_s = np.array([s.seconds for s in samples])
    per_work = taken_s / (typical @ np.array([1.0, 1e-4, 1e-5, 1e-6]))
    kept = per_work <= np.quantile(per_work, 0.95)
    chosen = typical[kept]
    # With the same number of runs in every step (a server of one request at a time) the cost of a
    # run cannot be told from that of a step; a guess would forbid batching before it was tried.
    told_apart = np.array([True, True, bool(np.ptp(chosen[:, 2]) > 0), True])
    floor = min(1.0, float(np.quantile(taken_s[kept] / np.maximum(chosen[:, 0], 1e-12), 0.05)))
    rows = (chosen / taken_s[kept, None])[:, told_apart]
    seconds = 1 - floor * rows[:, 0]
    scale = np.abs(rows).max(axis=0)
    found, _ = nnls(rows / scale, seconds)
    terms = np.zeros(4)
    terms[told_apart] = found / scale
    alpha, step_s, run_s, token_s = terms.tolist()
    return StepTime(alpha=floor + alpha, step_s=step_s, run_s=run_s, token_s=token_s)
