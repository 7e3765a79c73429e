"""Static batching: admit what waits, finish all of it, then admit again.

What. When nothing runs, up to `max_num_seqs` sequences are admitted at once. No other is admitted
until the last of them has finished, although finished ones leave slots empty. This is what a loop
around `model.generate(batch)` does; with one slot it is the naive deployment, one request at a
time.

Invariant. All sequences of a batch start in the same step.

When it loses. Answers differ in length, so most slots are empty most of the time, and a request
that arrives just too late waits for the longest answer of a batch it is not part of. It wins only
if nothing else arrives: an offline batch of equal lengths.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.batching.base import PolicyOptions, QueueView


class StaticBatching:
    """Admits only when nothing has started; ignores the options."""

    admits_immediately = False

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def admits(self, view: QueueView) -> bool:
        return view.num_started == 0 and view.num_free_slots > 0

    def wake_s(self, view: QueueView) -> float | None:
        return view.now_s if self.admits(view) else None
