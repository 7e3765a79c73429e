"""The bytes of the memory tier, and the copies between them and the KV cache.

A slot holds one block: the bytes of every tensor of the cache, one after the other, in whatever
format and order of tiles they are stored. Groups of layers share these tensors, so a block of any
group has the same size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.scheduler.kv.cache_tiers import Rate

Pairs = Sequence[tuple[int, int]]


def bytes_per_block(kv: KvCache) -> int:
    """Bytes of one block in all tensors of the cache."""
    return sum(tensor.nbytes for tensor in kv.tensors) // kv.num_blocks


class BlockSlab:
    """`num_slots` slots of host memory, pinned if the cache is on a GPU.

    `rows`: the memory itself, [num_slots, bytes of a block], where others have to read it.
    """

    def __init__(
        self,
        kv: KvCache,
        num_slots: int,
        rate: Rate,
        rows: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.rate, self.block_bytes = rate, bytes_per_block(kv)
        self._flat = [
            tensor.view(torch.uint8).view(kv.num_blocks, -1)
            for tensor in kv.tensors
            if tensor.numel()
        ]
        self._on_cpu = kv.tensors[0].device.type == "cpu"
        if rows is None:
            self._slots = torch.empty(
                (num_slots, self.block_bytes), dtype=torch.uint8, pin_memory=not self._on_cpu
            )
        else:
            self._slots = torch.from_numpy(rows)
        self._rows: npt.NDArray[np.uint8] = self._slots.numpy()
        self._blocks = [flat.numpy() for flat in self._flat] if self._on_cpu else []

    def row(self, slot: int) -> memoryview[Any]:
        """The bytes of a slot, to be written to or read from a file."""
        return memoryview(self._rows[slot])

    def transfer(self, stores: Pairs, loads: Pairs) -> None:
        """Copy blocks to slots, (block, slot), and then slots to blocks, (slot, block)."""
        began_s = time.perf_counter()
        if self._on_cpu:
            self._copy_rows(stores, loads)
        else:
            self._copy_over_bus(stores, loads)
        num_bytes = (len(stores) + len(loads)) * self.block_bytes
        self.rate.observe(num_bytes, time.perf_counter() - began_s)

    def _copy_rows(self, stores: Pairs, loads: Pairs) -> None:
        rows, first = self._rows, 0
        for blocks in self._blocks:
            end = first + blocks.shape[1]
            for block, slot in stores:
                rows[slot, first:end] = blocks[block]
            for slot, block in loads:
                blocks[block] = rows[slot, first:end]
            first = end

    @torch.inference_mode()
    def _copy_over_bus(self, stores: Pairs, loads: Pairs) -> None:
        if stores:
            blocks, slots = _columns(stores)
            index = blocks.to(self._flat[0].device)
            gathered: Tensor = torch.cat([flat.index_select(0, index) for flat in self._flat], 1)
            self._slots[slots] = gathered.cpu()
        if loads:
            slots, blocks = _columns(loads)
            device = self._flat[0].device
            rows, index = self._slots[slots].to(device), blocks.to(device)
            sizes = [flat.shape[1] for flat in self._flat]
            for flat, part in zip(self._flat, rows.split(sizes, 1), strict=True):
                flat.index_copy_(0, index, part)


def _columns(pairs: Pairs) -> tuple[Tensor, Tensor]:
    table = torch.tensor(pairs)
    return table[:, 0].contiguous(), table[:, 1].contiguous()
