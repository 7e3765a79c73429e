"""The target's last hidden states, recorded from steps for drafters that read them.

The runner passes every step's rows after its tokens are chosen. The latest rows of a sequence are
kept, at most `window` of them and without gaps, if it ran within the last `window` steps. Rows of
rejected drafts are never included, and a sequence that continues elsewhere (preempted, a prefix
hit) starts again. A step is recorded as a whole, which costs a microsecond for any batch; its rows
are assigned to sequences only on demand, or when many steps or a large one are pending. While
nothing is drafted there is no demand.

Shape suffixes: T rows of a step, R rows of one sequence, C hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.scheduler.plan import Run

MAX_PENDING = 32  # steps whose rows are not yet assigned
MANY_ROWS = 256  # larger steps are assigned at once, because they would hold much memory


@dataclass(slots=True)
class _Trail:
    """`num_rows` rows of the positions from `start` on."""

    start: int
    parts: list[Tensor]
    num_rows: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_rows


class HiddenStates:
    """Recent last hidden states by sequence."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._notes: list[tuple[Sequence[Run], Sequence[int], Tensor]] = []
        self._trails: dict[int, _Trail] = {}

    def observe(self, runs: Sequence[Run], num_outputs: Sequence[int], x_TC: Tensor) -> None:
        self._notes.append((runs, num_outputs, x_TC))
        if len(self._notes) >= MAX_PENDING or len(x_TC) >= MANY_ROWS:
            self._assign_rows()

    def of(self, seq_id: int, num_known: int) -> tuple[int, Tensor] | None:
        """(first position, rows_RC up to the row that chose the last of `num_known` tokens); None
        if unknown.
        """
        self._assign_rows()
        trail = self._trails.get(seq_id)
        if trail is None or not trail.parts or trail.end != num_known - 1:
            return None
        if len(trail.parts) > 1:
            trail.parts = [torch.cat(trail.parts)]
        return trail.start, trail.parts[0]

    def pretend(self, seq_id: int, num_known: int, like_C: Tensor) -> None:
        """Fill in missing rows of a sequence, to measure the cost of drafts."""
        trail = self._trails.get(seq_id)
        start = 0 if trail is None else trail.end
        self._add(seq_id, start, like_C.expand(num_known - 1 - start, -1))

    def use_up(self, seq_id: int) -> None:
        """Mark the rows as read; later ones continue where they ended."""
        trail = self._trails.get(seq_id)
        if trail is not None:
            trail.start, trail.parts, trail.num_rows = trail.end, [], 0

    def forget(self, seq_id: int) -> None:
        self._assign_rows()
        self._trails.pop(seq_id, None)

    def _assign_rows(self) -> None:
        """Assign the rows of recorded steps to their sequences; a window needs no more steps than
        rows.
        """
        notes, self._notes = self._notes[-self._window :], []
        for runs, num_outputs, x_TC in notes:
            first = 0
            for run, given in zip(runs, num_outputs, strict=True):
                num_fed = len(run.tokens)
                num_kept = num_fed - (run.max_outputs - given if given else run.num_drafts)
                self._add(run.seq_id, run.start, x_TC[first : first + num_kept])
                first += num_fed

    def _add(self, seq_id: int, start: int, rows_RC: Tensor) -> None:
        trail = self._trails.get(seq_id)
        if trail is None or trail.end != start:
            trail = self._trails[seq_id] = _Trail(start, [])
        trail.parts.append(rows_RC)
        trail.num_rows += len(rows_RC)
        if len(rows_RC) >= self._window or trail.num_rows >= 2 * self._window:
            end = trail.end
            latest_RC = torch.cat(trail.parts)[-self._window :].clone()
            trail.parts, trail.num_rows = [latest_RC], len(latest_RC)
            trail.start = end - len(latest_RC)
