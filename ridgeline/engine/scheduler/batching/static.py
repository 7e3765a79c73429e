"""Static batching: take what waits, finish all of it, then take again.

What. When nothing runs, up to `max_num_seqs` sequences join at once; until the last of them is
finished nobody else does, although finished ones leave empty seats. This is what a loop around
`model.generate(batch)` does; with one seat it is the naive deployment: one request at a time.

Invariant. All sequences of a batch started in the same step.

When it loses. Answers differ in length, so most seats are empty most of the time, and a request that
comes just too late waits for the longest answer of a batch that it is not part of. It wins only
where nothing else arrives: an offline batch of equal lengths.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.batching.base import PolicyOptions, QueueView


class StaticBatching:
    """Joins only when nothing has started; the options are for policies that wait."""

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def admits(self, view: QueueView) -> bool:
        return view.num_started == 0 and view.num_free_slots > 0

    def wake_s(self, view: QueueView) -> float | None:
        return view.now_s if self.admits(view) else None
