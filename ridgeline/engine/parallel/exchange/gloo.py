"""Exchanges over gloo, the CPU backend of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class GlooBackend:
    """Process groups of gloo, on the loopback interface or that of `host`, an address of this
    machine.
    """

    def __init__(self, timeout_s: float, host: str | None = None) -> None:
        self._timeout_s, self._host = timeout_s, host

    def make_group(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        make_device = dist.ProcessGroupGloo.create_device
        options._devices = [
            make_device(hostname=self._host) if self._host else make_device(interface="lo")
        ]
        return dist.ProcessGroupGloo(store, rank, size, options)
