"""A step's runs as tensors: the only place that makes them from host lists.

Shape legend: T tokens of the step, S rows that are sampled (of a run with drafts: the last known
token's and each draft's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from ridgeline.engine.core.plan import Run


@dataclass(frozen=True)
class Batch:
    """The step on the device. `sampled_S`: rows after which a token is sampled; `end` > every
    position."""

    tokens_T: Tensor
    positions_T: Tensor
    sampled_S: Tensor
    end: int


def make_batch(runs: Sequence[Run], device: torch.device) -> Batch:
    """All of a step's token-level tensors, by one transfer of one list."""
    tokens = list(chain.from_iterable(run.tokens for run in runs))
    spans = [range(run.start, run.start + len(run.tokens)) for run in runs]
    ends = accumulate(len(run.tokens) for run in runs)
    placed = zip(runs, ends, strict=True)
    sampled = [row for run, end in placed for row in range(end - run.num_given, end)]
    packed = torch.tensor([*tokens, *chain.from_iterable(spans), *sampled], device=device)
    sizes = [len(tokens), len(tokens), len(sampled)]
    tokens_T, positions_T, sampled_S = torch.split(packed, sizes)
    return Batch(tokens_T, positions_T, sampled_S, max(span.stop for span in spans))
