"""Registry of batching policies: name -> "module:Class". Nothing is imported until chosen."""

from __future__ import annotations

from importlib import import_module

from ridgeline.engine.scheduler.batching.base import BatchingPolicy, PolicyOptions, QueueView
from ridgeline.errors import BadInput

POLICIES = {
    "static": "ridgeline.engine.scheduler.batching.static:StaticBatching",
    "dynamic": "ridgeline.engine.scheduler.batching.dynamic:DynamicBatching",
    "continuous": "ridgeline.engine.scheduler.batching.continuous:ContinuousBatching",
}

__all__ = ["POLICIES", "BatchingPolicy", "PolicyOptions", "QueueView", "make_policy", "seconds_of"]


def seconds_of(wait_ms: float | None) -> float | None:
    """A wait in seconds; None stays None, which derives it."""
    return None if wait_ms is None else wait_ms / 1000


def make_policy(
    name: str, *, wait_s: float | None = 0.0, num_to_start: int | None = None
) -> BatchingPolicy:
    """Build the policy `name`.

    `wait_s` (None: derived from the SLO of requests) and `num_to_start` apply to policies that wait
    for a batch.
    """
    if name not in POLICIES:
        raise BadInput("unknown batching policy", value=name, limit=", ".join(POLICIES))
    if wait_s is not None and not wait_s >= 0:
        raise BadInput("the batching wait must not be negative", value=wait_s, limit=">= 0 s")
    if num_to_start is not None and num_to_start < 1:
        raise BadInput(
            "a batch needs at least one request to start", value=num_to_start, limit=">= 1"
        )
    module, _, cls = POLICIES[name].partition(":")
    policy: type[BatchingPolicy] = getattr(import_module(module), cls)
    return policy(PolicyOptions(wait_s=wait_s, num_to_start=num_to_start))
