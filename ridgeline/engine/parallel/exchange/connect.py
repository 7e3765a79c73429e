"""Chooses how the ranks of a model exchange tensors."""

from __future__ import annotations

from ridgeline.engine.parallel.exchange.base import ProcessCollectives
from ridgeline.engine.parallel.exchange.gloo import GlooCollectives
from ridgeline.engine.parallel.exchange.shared_memory import SharedMemoryCollectives
from ridgeline.modelspec.shard import Shard


def make_collectives(
    shard: Shard, timeout_s: float, segment: int | None, host: str | None = None
) -> ProcessCollectives:
    """Those over shared memory where ranks have some (`segment` is its descriptor), else gloo's.

    `host` is this machine's address in the network of several nodes.
    """
    if segment is None:
        return GlooCollectives(shard, timeout_s, host)
    return SharedMemoryCollectives(shard, timeout_s, segment)
