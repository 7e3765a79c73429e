"""Continuous batching: a request joins in any step that has a seat and tokens for it.

What. Batches are re-formed in every step: who finishes leaves its seat at once, who waits takes it
in the next step, in the middle of everybody else's answers (iteration-level scheduling: Orca, Yu et
al., OSDI 2022; "in-flight batching" in TensorRT-LLM).

Invariant. While a request waits, all seats are taken, or this step's token budget is used up, or the
block pool is.

When it loses. Never in throughput; but prompts that join lengthen the steps of those who are
already answering (their itl), which is what the token budget and chunked prefill bound.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.batching.base import PolicyOptions, QueueView


class ContinuousBatching:
    """Joins whenever there is room; the options are for policies that wait."""

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def admits(self, view: QueueView) -> bool:
        return view.num_tokens > 0 and view.num_free_slots > 0

    def wake_s(self, view: QueueView) -> float | None:
        return view.now_s if view.num_free_slots > 0 else None
