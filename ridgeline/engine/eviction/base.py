"""Score-based eviction: the contract of the methods that choose what a sequence keeps.

Once a sequence has more tokens than its budget, the scheduler plans a `KvCompaction`: the number of
tokens that stay, and their blocks. A `TokenSelector` says which, for each layer and head, by
attention that it has observed. `KvEvictor` shows it the queries of every step and lets it attend
where the heads of a layer keep different numbers of tokens.

Invariants, checked by `tests/conformance/test_kv_eviction.py`:

1. The choice depends on the sequence's own queries and keys alone.
2. Kept tokens stay in their order, and the latest ones are always kept.
3. Keys and values are moved as they are stored, without being computed again.

What a selector remembers belongs to a slot, of which every running sequence has one; a sequence
that begins at position 0 begins with nothing.

Shape legend: T rows of a run, H query heads, K key heads, G = H/K, D head_dim, W numbers of a
stored row, B block_size, L cached tokens, M kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.scheduler.kv.eviction import KvCompaction
from ridgeline.engine.scheduler.plan import Run


class TokenSelector(Protocol):
    """One method."""

    def observes(self, run: Run) -> bool:
        """Whether `observe` needs the queries of this run."""
        ...

    def observe(self, run: Run, q_THD: Tensor, layer: int) -> None:
        """Note the queries of a run, whose keys are in the cache."""
        ...

    def attends(self, run: Run) -> bool:
        """Whether `attend` has to compute this run's attention."""
        ...

    def attend(self, run: Run, q_THD: Tensor, layer: int) -> Tensor:
        """o_THD of a run whose heads keep different numbers of tokens."""
        ...

    def compact(self, compaction: KvCompaction) -> None:
        """Choose and move what is kept, in every layer."""
        ...


class StoredRows:
    """The cache as rows of one sequence, read and written as they are stored."""

    def __init__(self, cache: KvCache) -> None:
        self.cache, self.block_size = cache, cache.block_size

    def read(self, layer: int, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """rows_2KLW of the first tokens in `blocks`."""
        kv_N2KBW = self.cache.layers[layer]
        tiles_S2KBW = kv_N2KBW[torch.tensor(blocks, device=kv_N2KBW.device)]
        rows_2KSBW = self.cache.format.from_tiles(tiles_S2KBW).permute(1, 2, 0, 3, 4)
        return rows_2KSBW.flatten(2, 3)[:, :, :num_tokens]

    def keys(self, layer: int, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """Float64 keys k_KLD of the first tokens in `blocks`."""
        rows_KLW = self.read(layer, blocks, num_tokens)[0]
        return self.cache.format.decode(rows_KLW.contiguous(), torch.float32).double()

    def write(self, layer: int, blocks: Sequence[int], rows_2KMW: Tensor) -> None:
        """Fill `blocks` with rows, from the first position on; the last one may stay incomplete."""
        kv_N2KBW, size = self.cache.layers[layer], self.block_size
        num_sides, num_heads, num_rows, width = rows_2KMW.shape
        missing = len(blocks) * size - num_rows
        empty = rows_2KMW.new_zeros((num_sides, num_heads, missing, width))
        full_2KSBW = torch.cat((rows_2KMW, empty), 2).unflatten(2, (len(blocks), size))
        tiles_S2KBW = self.cache.format.to_tiles(full_2KSBW.permute(2, 0, 1, 3, 4).contiguous())
        kv_N2KBW[torch.tensor(blocks, device=kv_N2KBW.device)] = tiles_S2KBW


def best(scores_KL: Tensor, count: int) -> Tensor:
    """Indices [K, count] of the largest scores, ascending; of equal ones the first."""
    order_KL = scores_KL.argsort(dim=1, descending=True, stable=True)
    return order_KL[:, :count].sort(dim=1).values


def pick(rows_2KLW: Tensor, index_KM: Tensor) -> Tensor:
    """rows_2KMW at the indices of each head."""
    num_sides, _, _, width = rows_2KLW.shape
    index_2KMW = index_KM[None, :, :, None].expand(num_sides, -1, -1, width)
    return rows_2KLW.gather(2, index_2KMW)
