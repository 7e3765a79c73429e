"""Dynamic batching: wait briefly for more requests, then run the batch to its end.

What. Like static batching, but a batch starts once `num_to_start` requests wait or the oldest of
them has waited `wait_s`, whichever comes first (the dynamic batcher of Triton Inference Server and
TensorFlow Serving: maximum batch size and queue delay).

Without a `wait_s` the wait is derived from the SLO: the batch starts when the first request in
order could not meet its TTFT otherwise, by the p95 of the time from slot to first token so far.

Invariant. While nothing runs, no request waits longer than `wait_s`, or past the latest start of
the first one, for others.

When it loses. At low load the wait adds to the latency of every request, as there are no others to
wait for. Like static batching it leaves slots empty until the longest answer is done. It suits
models that answer in one step (encoders, classifiers) rather than token by token.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.batching.base import DEFAULT_WAIT_S, PolicyOptions, QueueView


class DynamicBatching:
    """Starts a batch at a number of requests, or after a time with whatever is waiting."""

    admits_immediately = False

    def __init__(self, options: PolicyOptions) -> None:
        self._wait_s, self._num_to_start = options.wait_s, options.num_to_start

    def admits(self, view: QueueView) -> bool:
        if view.num_started or view.num_free_slots <= 0:
            return False
        return view.num_admitted > 0 or self._is_full(view) or view.now_s >= self._due_s(view)

    def wake_s(self, view: QueueView) -> float | None:
        if view.num_started:
            return None
        return view.now_s if self._is_full(view) else max(view.now_s, self._due_s(view))

    def _is_full(self, view: QueueView) -> bool:
        return view.num_waiting >= (self._num_to_start or view.max_num_seqs)

    def _due_s(self, view: QueueView) -> float:
        if self._wait_s is not None:
            return view.oldest_arrival_s + self._wait_s
        if view.latest_start_s is not None:
            return view.latest_start_s
        return view.oldest_arrival_s + DEFAULT_WAIT_S
