"""A step's runs as tensors: the only place that builds them from host lists.

Shape legend: T tokens of the step, S rows that are sampled (with drafts: one for the last known
token and one for each draft).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from ridgeline.engine.scheduler.plan import Run


@dataclass(frozen=True)
class StepBatch:
    """The step on the device. `end` is larger than every position."""

    runs: Sequence[Run]
    tokens_T: Tensor
    positions_T: Tensor
    end: int

    def sampled_rows(self) -> Tensor:
        """Indices [S] of the rows after which a token is sampled.

        A separate transfer to the device, only needed for steps that do not sample every row.
        """
        rows = sampled_rows(self.runs)
        return torch.tensor(rows, dtype=torch.int64, device=self.tokens_T.device)


def sampled_rows(runs: Sequence[Run]) -> list[int]:
    """Indices of the rows of a step after which a token is sampled."""
    ends = accumulate([len(run.tokens) for run in runs])
    placed = zip(runs, ends, strict=True)
    return [row for run, end in placed for row in range(end - run.max_outputs, end)]


def pack_rows(runs: Sequence[Run]) -> tuple[array[int], int]:
    """The tokens of all rows followed by their positions, and an upper bound of the positions."""
    packed = array("q", chain.from_iterable([run.tokens for run in runs]))
    if len(packed) == len(runs):  # every run decodes one token
        starts = [run.start for run in runs]
        packed.extend(starts)
        return packed, max(starts) + 1
    spans = [range(run.start, run.start + len(run.tokens)) for run in runs]
    packed.extend(chain.from_iterable(spans))
    return packed, max(span.stop for span in spans)


def make_batch(runs: Sequence[Run], device: torch.device) -> StepBatch:
    """All token-level tensors of a step, moved to the device in one transfer."""
    packed, end = pack_rows(runs)
    num_rows = len(packed) // 2
    rows = torch.frombuffer(packed, dtype=torch.int64).to(device)
    return StepBatch(runs, rows[:num_rows], rows[num_rows:], end)
