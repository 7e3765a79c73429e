"""The sampler of the CPU: one pass for the greedy rows, a few for drawn ones, never a full sort.

What: the first largest of a row takes one vectorised pass. A drawn row is weighed once; for top-k
and top-p its logits fall into buckets of equal width below the largest, and only the bucket in
which the cut lies is sorted (native/sampling/draw.h).

Invariant: the choices of `reference.py`, ties included, up to float32 rounding at the boundary of a
draw. When it loses: logits on another device.

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


def sample(logits_SV: Tensor, at: Sequence[SamplePoint]) -> list[Choice]:
    """See `ridgeline.engine.sampling.base.Sampler`."""
    return sample_with(KERNELS, logits_SV, at)


def _greedy(logits_GV: Tensor) -> list[int]:
    tokens = first_largest(logits_GV.float(), torch.get_num_threads())
    if -1 in tokens:
        raise no_token_error(tokens.index(-1))
    return tokens


def _draw(logits_RV: Tensor, at: Sequence[SamplePoint]) -> list[int]:
    logits_RV = logits_RV.float().contiguous()
    num_rows, width = logits_RV.shape
    asked = [number for a in at for number in _record(a)]
    at_first, threads = logits_RV.data_ptr(), torch.get_num_threads()
    tokens = _native.draw(at_first, width, num_rows, width, asked, threads, "auto")
    if -1 in tokens:
        raise no_token_error(tokens.index(-1))
    return tokens


def _record(at: SamplePoint) -> tuple[float, ...]:
    """What native/bindings/sampling.cpp's `draw` reads for a row."""
    asked = at.sampling
    temperature = max(asked.temperature, MIN_TEMPERATURE)
    return temperature, asked.min_p, asked.top_k, asked.top_p, uniform(at.seed, at.index)


KERNELS = SamplerKernels(_greedy, _draw)
