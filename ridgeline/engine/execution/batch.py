"""A step's runs as tensors: the only place that makes them from host lists.

Shape legend: T tokens of the step, S rows that are sampled (of a run with drafts: the last known
token's and each draft's).
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
    """The step on the device. `end` > every position."""

    runs: Sequence[Run]
    tokens_T: Tensor
    positions_T: Tensor
    end: int

    def sampled_rows(self) -> Tensor:
        """Rows after which a token is sampled: a transfer of its own, for steps where not all
        are."""
        ends = accumulate([len(run.tokens) for run in self.runs])
        placed = zip(self.runs, ends, strict=True)
        rows = [row for run, end in placed for row in range(end - run.max_outputs, end)]
        return torch.tensor(rows, dtype=torch.int64, device=self.tokens_T.device)


def pack_rows(runs: Sequence[Run]) -> tuple[array[int], int]:
    """The tokens of all rows, behind them their positions; what is larger than every position."""
    packed = array("q", chain.from_iterable([run.tokens for run in runs]))
    if len(packed) == len(runs):  # everybody decodes one token
        starts = [run.start for run in runs]
        packed.extend(starts)
        return packed, max(starts) + 1
    spans = [range(run.start, run.start + len(run.tokens)) for run in runs]
    packed.extend(chain.from_iterable(spans))
    return packed, max(span.stop for span in spans)


def make_batch(runs: Sequence[Run], device: torch.device) -> StepBatch:
    """All of a step's token-level tensors, by one transfer of one list."""
    packed, end = pack_rows(runs)
    num_rows = len(packed) // 2
    rows = torch.frombuffer(packed, dtype=torch.int64).to(device)
    return StepBatch(runs, rows[:num_rows], rows[num_rows:], end)
