"""What drafters learn from that read the target's mind: its last hidden states, as steps make them.

The runner shows every step's rows after its tokens are chosen. Of a sequence the latest rows are
kept, as many as `window`, without a gap: rows of rejected drafts never get in, and where a sequence
goes on at another place (preempted, a prefix hit) its rows begin anew. Kept are views of the step's
tensor: nothing is copied until somebody asks.

Shapes: T rows of a step, R rows of one sequence, C hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.core.plan import Run


class Watch(Protocol):
    """Who is shown the hidden states of every step."""

    def note(self, runs: Sequence[Run], num_given: Sequence[int], x_TC: Tensor) -> None:
        """`num_given[i]`: tokens that run i gave; with drafts, one more than were accepted."""
        ...


class NoWatch:
    """Nobody looks."""

    def note(self, runs: Sequence[Run], num_given: Sequence[int], x_TC: Tensor) -> None:
        pass


@dataclass(slots=True)
class _Trail:
    """Rows of the positions from `start` on."""

    start: int
    parts: list[Tensor]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.parts))


class States:
    """See the head of this file."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._trails: dict[int, _Trail] = {}

    def note(self, runs: Sequence[Run], num_given: Sequence[int], x_TC: Tensor) -> None:
        first = 0
        for run, given in zip(runs, num_given, strict=True):
            num_kept = len(run.tokens) - (run.num_given - given if given else run.num_drafts)
            self._add(run.seq_id, run.start, x_TC[first : first + num_kept])
            first += len(run.tokens)

    def of(self, seq_id: int, num_known: int) -> tuple[int, Tensor] | None:
        """(first position, rows_RC up to the one that the last of `num_known` tokens was chosen
        from); None where they are not known."""
        trail = self._trails.get(seq_id)
        if trail is None or not trail.parts or trail.start + trail.num_rows != num_known - 1:
            return None
        if len(trail.parts) > 1:
            trail.parts = [torch.cat(trail.parts)]
        return trail.start, trail.parts[0]

    def pretend(self, seq_id: int, num_known: int, like_C: Tensor) -> None:
        """As if steps had made the sequence's missing rows: for measuring what drafts cost."""
        trail = self._trails.get(seq_id)
        start = 0 if trail is None else trail.start + trail.num_rows
        self._add(seq_id, start, like_C.expand(num_known - 1 - start, -1))

    def use_up(self, seq_id: int) -> None:
        """The rows were read; those that follow go on where they ended."""
        trail = self._trails.get(seq_id)
        if trail is not None:
            trail.start, trail.parts = trail.start + trail.num_rows, []

    def forget(self, seq_id: int) -> None:
        self._trails.pop(seq_id, None)

    def _add(self, seq_id: int, start: int, rows_RC: Tensor) -> None:
        trail = self._trails.get(seq_id)
        if trail is None or trail.start + trail.num_rows != start:
            trail = self._trails[seq_id] = _Trail(start, [])
        trail.parts.append(rows_RC)
        if len(rows_RC) >= self._window or trail.num_rows >= 2 * self._window:
            end = trail.start + trail.num_rows
            latest_RC = torch.cat(trail.parts)[-self._window :].clone()
            trail.start, trail.parts = end - len(latest_RC), [latest_RC]
