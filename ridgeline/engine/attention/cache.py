"""The paged KV cache: one tensor per layer, divided into blocks of `block_size` tokens.

    layer ─▶ kv [ block, key|value, kv head, position in block, stored row ]
                 NB      2           K          B                  W

A row holds one head's key or value of one token in the cache's format: W = D numbers of a float
dtype, or codes and a scale in bytes if it is quantised. One block of one head is one contiguous
tile [B, W], for keys and for values, in which the format may order the bytes of its rows as it
likes (`KvFormat.to_tiles`): a kernel reads tile after tile, and a gather of (block, head) tiles
lands in the [head, position, W] order that attention wants, so that collecting scattered blocks and
transposing are a single copy.

A layer with latent attention has one row per token in place of keys and values:
kv [ block, 1, 1, position in block, rank + rope_dim ].

The cache knows nothing of sequences: the block pool manages block numbers, this holds the bytes.
Memory starts as zeros (lazily, by the operating system), so that unused positions are always
finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.attention.kv_format import KvFormat, PlainKv
from ridgeline.engine.kernels.large_pages import own_pages
from ridgeline.modelspec.model import AttentionSpec, ModelSpec


class KvCache:
    """Keys and values of every layer.

    `layers[i]` is kv_N2KBW of layer i, stored in `format`; attention computes in `dtype`. Layers
    without keys have K = 0. `num_states` sequences can keep states in recurrent layers.
    """

    def __init__(
        self, layers: Sequence[Tensor], format: KvFormat, dtype: torch.dtype, num_states: int = 1
    ) -> None:
        self.layers, self.format, self.dtype = tuple(layers), format, dtype
        self.num_states = num_states
        self.num_blocks, _, _, self.block_size, _ = self.layers[0].shape

    @staticmethod
    def allocate(
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        format: KvFormat | None = None,
        num_states: int = 1,
    ) -> KvCache:
        """A zeroed cache of `num_blocks` blocks for every layer of `spec`.

        `format` None stores plain numbers of the compute dtype `dtype`.
        """
        format = PlainKv(dtype) if format is None else format
        return KvCache(
            [
                _zeros(
                    (num_blocks, *tile_shape(layer.attention, block_size, format)),
                    format.dtype,
                    torch.device(device),
                )
                for layer in spec.layers
            ],
            format,
            dtype,
            num_states,
        )

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (from, to), in every layer."""
        if not copies:
            return
        pairs = torch.tensor(copies, device=self.layers[0].device)
        sources, targets = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        for kv_N2KBW in self.layers:
            kv_N2KBW.index_copy_(0, targets, kv_N2KBW.index_select(0, sources))


def tile_shape(
    attention: AttentionSpec, block_size: int, format: KvFormat
) -> tuple[int, int, int, int]:
    """Shape of one layer's block: keys and values of every head, or one latent row per token."""
    latent = attention.latent
    if latent is not None:
        return 1, 1, block_size, format.width(latent.rank + latent.rope_dim)
    return 2, attention.num_kv_heads, block_size, format.width(attention.head_dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in pages that the operating system supplies on first write.

    `torch.zeros` writes every page at once: 0.9 s and all of the memory for 800 MB, of which a
    lightly loaded server never uses most. Large caches ask for large pages: attention jumps from
    block to block, and the walk to a page that is not in the TLB costs as much as the block
    (docs/concepts/kernels.md).
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    return own_pages(nbytes).view(dtype).view(shape)
