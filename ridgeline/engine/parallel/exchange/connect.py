"""Chooses how the ranks of a model exchange tensors."""

from __future__ import annotations

import torch

from ridgeline.engine.parallel.exchange.base import ProcessCollectives
from ridgeline.engine.parallel.exchange.gloo import GlooBackend
from ridgeline.engine.parallel.exchange.nccl import NcclBackend
from ridgeline.engine.parallel.exchange.process_groups import (
    ProcessGroupBackend,
    ProcessGroupCollectives,
)
from ridgeline.engine.parallel.exchange.shared_memory import SharedMemoryCollectives
from ridgeline.modelspec.shard import Shard


def make_collectives(
    shard: Shard,
    timeout_s: float,
    segment: int | None,
    host: str | None = None,
    device: str = "cpu",
) -> ProcessCollectives:
    """Those over shared memory where ranks have some (`segment` is its descriptor), over NCCL where
    `device` is a CUDA device, else over gloo.

    `host` is this machine's address in the network of several nodes.
    """
    if segment is not None:
        return SharedMemoryCollectives(shard, timeout_s, segment)
    backend: ProcessGroupBackend = GlooBackend(timeout_s, host)
    if device != "cpu":
        backend = NcclBackend(timeout_s, torch.device(device))
    return ProcessGroupCollectives(shard, timeout_s, backend)
