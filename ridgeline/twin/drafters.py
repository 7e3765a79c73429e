"""What drafts of a modelled server cost: the drafter's steps, its weights, and its cache."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.speculation import shortened
from ridgeline.twin.config import TwinDrafter

SHORTEST, LONGER = 1, 2  # layers: their difference is one layer without embeddings


class DrafterMemory(NamedTuple):
    """Bytes of weights on one device, and bytes of cache per token of the whole replica."""

    weight_bytes: float
    kv_bytes_per_token: float


def drafter_replica(
    drafter: TwinDrafter, replica: Replica, draft_spec: ModelSpec | None
) -> Replica | None:
    """The drafter on the devices of the model; None where drafts are looked up.

    A head is the last layer of the model, in its formats, with the model's output layer, which it
    reads for every draft. `draft_spec`: the model that drafts. Raises UserError where the layout
    does not suit it.
    """
    if drafter.kind == "head":
        return shortened(replica, SHORTEST)
    if drafter.kind == "model":
        assert draft_spec is not None
        return build_replica(draft_spec, replica.device, replica.layout, kv_dtype=replica.kv_dtype)
    return None


def drafter_memory(drafter: TwinDrafter, replica: Replica, placed: Replica | None) -> DrafterMemory:
    """What the drafter takes from the memory of the cache. A head shares embeddings and output."""
    if placed is None:
        return DrafterMemory(0.0, 0.0)
    weights = placed.resident_bytes
    if drafter.kind == "head":
        weights = shortened(replica, LONGER).resident_bytes - weights
    return DrafterMemory(weights, placed.cost.kv_bytes_per_token)
