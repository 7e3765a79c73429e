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

Groups of layers that have separate block tables (`KvLayout`) share their tensors, because a
block belongs to one group at a time: the first layer of every group lies in one tensor, the second
ones in the next. Where layers differ in shape (Gemma 4 has heads of two sizes) there is one tensor
[block, number], and a layer is a part of every row.

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
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP, KvLayout
from ridgeline.modelspec.layer_inputs import kv_source
from ridgeline.modelspec.model import AttentionSpec, ModelSpec


class KvCache:
    """Keys and values of every layer.

    `layers[i]` is kv_N2KBW of layer i, stored in `format`; attention computes in `dtype`. Layers
    without keys have K = 0, and layers that share a cache have that of another.
    `num_states` sequences can keep states in recurrent layers. `layout`
    says in which of a run's block tables a layer finds its blocks; `tensors` are the memory.
    `recent` (INT4 only): the memory of each layer as bytes [block, …], and which of a run's
    `windows` names the blocks that hold its recent rows.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        format: KvFormat,
        dtype: torch.dtype,
        num_states: int = 1,
        layout: KvLayout = ONE_GROUP,
        tensors: Sequence[Tensor] = (),
        recent: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        self.layers, self.format, self.dtype = tuple(layers), format, dtype
        self.num_states, self.layout = num_states, layout
        self.tensors = tuple(tensors or {id(layer): layer for layer in layers}.values())
        self.recent = tuple(recent)
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
        layout: KvLayout = ONE_GROUP,
    ) -> KvCache:
        """A zeroed cache of `num_blocks` blocks for every layer of `spec`.

        `format` None stores plain numbers of the compute dtype `dtype`. With a `layout` that has
        windows, a block holds one group of layers.
        """
        format, device = PlainKv(dtype) if format is None else format, torch.device(device)
        if layout.recent:
            return _with_recent(spec, (num_blocks, block_size), dtype, device, format, layout)
        if layout.windowed and len(_shapes(spec)) > 1:
            memory, parts = _of_two_shapes(spec, (num_blocks, block_size), device, format, layout)
            return KvCache(parts, format, dtype, num_states, layout, [memory])
        shared: dict[int, Tensor] = {}  # by place within the group
        layers: list[Tensor] = []
        for i, layer in enumerate(spec.layers):
            if layer.attention.shares_kv:
                layers.append(layers[kv_source(spec, i)])
                continue
            shape = (num_blocks, *tile_shape(layer.attention, block_size, format))
            place = layout.place_of(i)
            if place is None:
                layers.append(_zeros(shape, format.dtype, device))
                continue
            if place not in shared:
                shared[place] = _zeros(shape, format.dtype, device)
            layers.append(shared[place])
        return KvCache(layers, format, dtype, num_states, layout)

    def only(self, kept: Sequence[int]) -> KvCache:
        """The same memory for the layers `kept`, which find their blocks in the same tables."""
        layers = [self.layers[i] for i in kept]
        recent = [self.recent[i] for i in kept] if self.recent else ()
        layout = self.layout if self.recent else self.layout.only(kept)
        return KvCache(layers, self.format, self.dtype, layout=layout, recent=recent)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (from, to), in every layer that has them."""
        if not copies:
            return
        pairs = torch.tensor(copies, device=self.layers[0].device)
        sources, targets = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        for kv_N2KBW in self.tensors:
            kv_N2KBW.index_copy_(0, targets, kv_N2KBW.index_select(0, sources))


def _shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """The numbers and sizes of KV heads of the layers that have a cache."""
    attentions = (layer.attention for layer in spec.layers)
    return {(a.num_kv_heads, a.head_dim) for a in attentions if not a.shares_kv and a.num_kv_heads}


def _of_two_shapes(
    spec: ModelSpec,
    blocks: tuple[int, int],
    device: torch.device,
    format: KvFormat,
    layout: KvLayout,
) -> tuple[Tensor, list[Tensor]]:
    """(memory [block, number], its layers) of blocks = (number, tokens of each).

    The layers of a group lie one after another in each block; the largest group fills it.
    """
    num_blocks, block_size = blocks
    own = [layer.attention for layer in spec.layers]
    shapes = [tile_shape(attention, block_size, format) for attention in own]
    ends, starts = [0] * layout.num_groups, [0] * len(own)
    for i, attention in enumerate(own):
        if not attention.shares_kv:
            group = layout.group_of(i)
            starts[i], ends[group] = ends[group], ends[group] + math.prod(shapes[i])
    memory = _zeros((num_blocks, max(ends)), format.dtype, device)
    layers = []
    for i, shape in enumerate(shapes):
        first = starts[kv_source(spec, i)]
        numbers = memory[:, first : first + math.prod(shape)]
        layers.append(numbers.view(num_blocks, *shape))
    return memory, layers


def _with_recent(
    spec: ModelSpec,
    blocks: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    format: KvFormat,
    layout: KvLayout,
) -> KvCache:
    """A cache in INT4 of blocks = (number, tokens of each).

    A block holds coded tiles of all layers, two by two, or recent rows of every other layer, one of
    them in the place of two tiles.
    """
    (num_blocks, block_size), num_layers = blocks, len(spec.layers)
    shape = (num_blocks, 2, *tile_shape(spec.layers[0].attention, block_size, format))
    pairs = [_zeros(shape, format.dtype, device) for _ in range(-(-num_layers // 2))]
    return KvCache(
        [pairs[i // 2][:, i % 2] for i in range(num_layers)],
        format,
        dtype,
        layout=layout,
        tensors=pairs,
        recent=[(pairs[i // 2].view(num_blocks, -1), i % 2) for i in range(num_layers)],
    )


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
