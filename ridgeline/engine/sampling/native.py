"""The CPU sampler: one pass for greedy rows, a few for drawn ones, never a full sort.

What. The argmax of a row takes one vectorised pass. A drawn row is exponentiated once; for top-k
and top-p its logits are put into buckets of equal width below the largest, and only the bucket that
contains the cut is sorted (native/sampling/draw.h).

Invariant. The choices of `reference.py`, ties included, up to float32 rounding at the boundary of a
draw.
When it loses. Logits on another device would have to be copied.

Shapes: G greedy rows, R rows drawn at random, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.row_argmax import first_largest
from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.batched import (
    MIN_TEMPERATURE,
    SamplerKernels,
    no_token_error,
    sample_with,
)
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.scheduler.plan import SamplePoint


def sample(logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[Choice]:
    """Choose one token per row of CPU logits_SV [S, V]."""
    return sample_with(KERNELS, logits_SV, points)


def _greedy(logits_GV: Tensor) -> list[int]:
    tokens = first_largest(logits_GV.float(), torch.get_num_threads())
    if -1 in tokens:
        raise no_token_error(tokens.index(-1))
    return tokens


def _draw(logits_RV: Tensor, points: Sequence[SamplePoint]) -> list[int]:
    logits_RV = logits_RV.float().contiguous()
    num_rows, width = logits_RV.shape
    parameters = [number for point in points for number in _parameters(point)]
    address, threads = logits_RV.data_ptr(), torch.get_num_threads()
    tokens = _native.draw(address, width, num_rows, width, parameters, threads, "auto")
    if -1 in tokens:
        raise no_token_error(tokens.index(-1))
    return tokens


def _parameters(point: SamplePoint) -> tuple[float, ...]:
    """What native/bindings/sampling.cpp's `draw` reads for a row."""
    sampling, number = point.sampling, uniform(point.seed, point.index)
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    return temperature, sampling.min_p, sampling.top_k, sampling.top_p, number


KERNELS = SamplerKernels(_greedy, _draw)
