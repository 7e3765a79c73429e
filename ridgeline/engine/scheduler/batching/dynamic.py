"""Dynamic batching: wait a little for company, then run the batch to its end.

What. As static, but a batch starts when `num_to_start` requests wait or the oldest of them has waited
`wait_s`, whichever comes first (the dynamic batcher of Triton Inference Server and TensorFlow
Serving: max batch size and queue delay).

Invariant. Nobody waits for company longer than `wait_s` while nothing runs.

When it loses. The wait is added to the latency of every request at low load, where there is no company
to wait for; and like static batching it keeps seats empty until the longest answer is done. Its
home is models that answer in one step (encoders, classifiers), not token by token.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.batching.base import PolicyOptions, QueueView


class DynamicBatching:
    """Starts a batch of N requests, or of what there is after T seconds."""

    def __init__(self, options: PolicyOptions) -> None:
        self._wait_s, self._num_to_start = options.wait_s, options.num_to_start

    def admits(self, view: QueueView) -> bool:
        if view.num_started or view.num_free_slots <= 0:
            return False
        return view.num_admitted > 0 or self._enough(view) or view.now_s >= self._due_s(view)

    def wake_s(self, view: QueueView) -> float | None:
        if view.num_started:
            return None
        return view.now_s if self._enough(view) else max(view.now_s, self._due_s(view))

    def _enough(self, view: QueueView) -> bool:
        return view.num_waiting >= (self._num_to_start or view.max_num_seqs)

    def _due_s(self, view: QueueView) -> float:
        return view.oldest_arrival_s + self._wait_s
