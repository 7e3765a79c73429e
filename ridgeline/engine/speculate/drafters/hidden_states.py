"""What drafters learn from that read the target's mind: its last hidden states, as steps make them.

The runner shows every step's rows after its tokens are chosen. Of a sequence the latest rows are
kept, as many as `window`, without a gap, if it ran in the last `window` steps: rows of rejected
drafts never get in, and where a sequence goes on at another place (preempted, a prefix hit) its
rows begin anew. A step is put aside as it is, which costs a microsecond whatever its batch; only
when somebody asks (or many are put aside, or a large one) its rows are told apart. While nothing
is drafted nobody asks.

Shapes: T rows of a step, R rows of one sequence, C hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.scheduler.plan import Run

MOST_NOTES = 32  # steps that are put aside
MANY_ROWS = 256  # of a step that is told apart at once: it would keep much memory from being freed


@dataclass(slots=True)
class _Trail:
    """`num_rows` rows of the positions from `start` on."""

    start: int
    parts: list[Tensor]
    num_rows: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_rows


class States:
    """See the head of this file."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._notes: list[tuple[Sequence[Run], Sequence[int], Tensor]] = []
        self._trails: dict[int, _Trail] = {}

    def observe(self, runs: Sequence[Run], num_outputs: Sequence[int], x_TC: Tensor) -> None:
        self._notes.append((runs, num_outputs, x_TC))
        if len(self._notes) >= MOST_NOTES or len(x_TC) >= MANY_ROWS:
            self._tell_apart()

    def of(self, seq_id: int, num_known: int) -> tuple[int, Tensor] | None:
        """(first position, rows_RC up to the one that the last of `num_known` tokens was chosen
        from); None where they are not known."""
        self._tell_apart()
        trail = self._trails.get(seq_id)
        if trail is None or not trail.parts or trail.end != num_known - 1:
            return None
        if len(trail.parts) > 1:
            trail.parts = [torch.cat(trail.parts)]
        return trail.start, trail.parts[0]

    def pretend(self, seq_id: int, num_known: int, like_C: Tensor) -> None:
        """As if steps had made the sequence's missing rows: for measuring what drafts cost."""
        trail = self._trails.get(seq_id)
        start = 0 if trail is None else trail.end
        self._add(seq_id, start, like_C.expand(num_known - 1 - start, -1))

    def use_up(self, seq_id: int) -> None:
        """The rows were read; those that follow go on where they ended."""
        trail = self._trails.get(seq_id)
        if trail is not None:
            trail.start, trail.parts, trail.num_rows = trail.end, [], 0

    def forget(self, seq_id: int) -> None:
        self._tell_apart()
        self._trails.pop(seq_id, None)

    def _tell_apart(self) -> None:
        """The rows of what was put aside to their sequences; a window needs no more steps than it
        has rows."""
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
