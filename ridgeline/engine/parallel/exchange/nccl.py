"""Exchanges over NCCL, the backend of torch.distributed for CUDA devices: one device per rank.

An exchange is enqueued on the device's stream, between the kernels before and after it, while the
host goes on. A lost rank is therefore noticed by NCCL's watchdog thread, which ends the process
after the timeout; rank 0 then ends the others.

Floats are gathered and added in the order of places, as over gloo, not by NCCL's own sum, whose
order depends on the topology. That sends N - 1 parts to every rank where a ring would send
2 (N - 1) / N: the same for two ranks, twice as much for four.

Never run on a GPU: the tests replace the process group by gloo's.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


class NcclBackend:
    """Process groups of NCCL, whose exchanges run on the stream of `device`."""

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        self._timeout_s, self._device = timeout_s, device

    def make_group(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        # NCCL takes the device of a communicator from its first tensor, and barriers from this.
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)
