"""Continuous batching: a request is admitted in any step that has a slot and tokens for it.

What. The batch is re-formed in every step: a finished sequence frees its slot at once, and a
waiting request takes it in the next step, while the other sequences continue (iteration-level
scheduling: Orca, Yu et al., OSDI 2022; "in-flight batching" in TensorRT-LLM).

Invariant. While a request waits, all slots are taken, or this step's token budget is used up, or
the block pool is.

When it loses. Never in throughput, but newly admitted prompts lengthen the steps of the sequences
that are already decoding (their ITL). The token budget and chunked prefill bound that.
"""

from __future__ import annotations

from ridgeline.engine.scheduler.batching.base import PolicyOptions, QueueView


class ContinuousBatching:
    """Admits whenever there is room; ignores the options."""

    admits_immediately = True

    def __init__(self, options: PolicyOptions) -> None:
        pass

    def admits(self, view: QueueView) -> bool:
        return view.num_tokens > 0 and view.num_free_slots > 0

    def wake_s(self, view: QueueView) -> float | None:
        return view.now_s if view.num_free_slots > 0 else None
