"""How the layers of a model share the blocks of a paged KV cache.

    Gemma 3 270M    3 layers see everything, 15 see a window of 512
    groups          full (3)  window (3)  window (3)  window (3)  window (3)  window (3)
    a sequence      one block table per group, all from one pool of equal blocks

A block holds `block_size` positions of one group's layers, and every block has the same bytes, so
any group can take it. Where layers differ in size, as in Gemma 4, groups differ in their number of
layers, and each layer finds its keys and values at a fixed offset of the block. Groups with a
window give the blocks behind it back to the pool while the sequence grows; the group that sees
everything keeps all of them. Models without windows have one group, whose block holds all layers.

Source: the hybrid KV cache manager of vLLM (2025), which divides layers in the same way. The
alternative, a pool of each kind, would have to divide the memory between the kinds in advance: too
much for windows when contexts are long, too little when they are short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.modelspec.cost.kv_cache import kv_bytes_per_token, layer_kv_bytes, why_not_int4_kv
from ridgeline.modelspec.format import KV_GROUP
from ridgeline.modelspec.model import ModelSpec

TILE_TOKENS = 64
"""Attention kernels read keys in tiles of this size at fixed positions, so blocks are given back
in whole tiles, and no sum depends on how many have been."""


NO_LAYER = -1
"""Stands for the layers that a part of a model leaves out of the group that sees everything."""


BLOCK_SIZE = 16
"""Positions of a block where nothing else is configured."""


class KvLayout(msgspec.Struct, frozen=True):
    """Groups of layers with separate block tables, as layer numbers.

    `full` are the layers that keep every position, () if there are none; `windowed` the groups that
    keep `window` positions or the current chunk of `chunk`, in whole tiles of `tile_tokens`.
    `position_bytes` is the size of one position in a block of any group, `block_tokens` the
    positions of a block where nothing else is configured.

    With `recent`, the layers of `full` are in the windowed groups, too, which hold the tokens that
    a cache in INT4 cannot code yet: those of the block that is being filled.
    """

    full: tuple[int, ...] = (0,)
    windowed: tuple[tuple[int, ...], ...] = ()
    window: int | None = None
    chunk: int | None = None
    position_bytes: int = 0
    tile_tokens: int = TILE_TOKENS
    block_tokens: int = BLOCK_SIZE
    recent: bool = False

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block table: `full`, if any, then the windowed groups."""
        return (self.full, *self.windowed) if self.full else self.windowed

    @property
    def num_groups(self) -> int:
        """Blocks that a sequence needs for `block_size` more positions."""
        return bool(self.full) + len(self.windowed)

    def place_of(self, layer: int) -> int | None:
        """A layer's place within its group; None where blocks hold all layers."""
        if not self.windowed:
            return None
        return next((own.index(layer) for own in self.groups if layer in own), None)

    def group_of(self, layer: int) -> int:
        """Index of a layer's group; 0 for a layer without a cache."""
        return next((j for j, own in enumerate(self.groups) if layer in own), 0)

    def only(self, kept: Sequence[int]) -> KvLayout:
        """The layout of a model of the layers `kept`, with the same groups, some perhaps empty."""
        if not self.windowed:
            return self
        number = {layer: i for i, layer in enumerate(kept)}
        full, *windowed = (
            tuple(number[layer] for layer in group if layer in number)
            for group in (self.full, *self.windowed)
        )
        has_full = full or (NO_LAYER,) if self.full else ()
        return msgspec.structs.replace(self, full=has_full, windowed=tuple(windowed))

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of any group."""
        return block_size * self.position_bytes

    def first_place(self, position: int, block_size: int) -> int:
        """Index in a windowed group's table of the first block that `position` still needs."""
        if self.chunk is not None:
            first = position // self.chunk * self.chunk
        else:
            assert self.window is not None
            first = max(0, position - self.window + 1)
        return first // self._alignment(block_size) * self._alignment(block_size) // block_size

    def _alignment(self, block_size: int) -> int:
        """Positions that are given back together."""
        return math.lcm(block_size, self.tile_tokens, self.chunk or 1)

    def max_window_places(self, step_tokens: int, block_size: int) -> int:
        """The most blocks of a windowed group in a sequence whose steps feed `step_tokens`."""
        if self.chunk is not None:
            span = self._alignment(block_size) + step_tokens
        else:
            assert self.window is not None
            span = self.window + self._alignment(block_size) + step_tokens - 2
        return -(-span // block_size)

    def max_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """The most blocks that a sequence holds until it has `num_tokens` tokens in the cache."""
        places = -(-num_tokens // block_size)
        if not self.windowed:
            return places
        kept = min(places, self.max_window_places(step_tokens, block_size))
        return places * bool(self.full) + kept * len(self.windowed)

    def decode_blocks(self, num_tokens: int, block_size: int) -> int:
        """The blocks of a sequence that has just computed its `num_tokens`-th token by itself."""
        places = -(-num_tokens // block_size)
        if not self.windowed:
            return places
        kept = places - self.first_place(max(0, num_tokens - 1), block_size)
        return places * bool(self.full) + kept * len(self.windowed)

    def shared_blocks(self, num_tokens: int, num_shared: int, block_size: int) -> int:
        """Of those blocks, the ones full of the first `num_shared` tokens: what sequences with the
        same beginning have in common."""
        places = num_shared // block_size
        if not self.windowed:
            return places
        given_back = self.first_place(max(0, num_tokens - 1), block_size)
        return places * bool(self.full) + max(0, places - given_back) * len(self.windowed)

    def held_bytes(self, context: int) -> int:
        """Bytes of KV cache that one sequence of `context` tokens holds while it decodes.

        With windows these are blocks of `block_tokens` positions; without, the last block's empty
        positions are not counted.
        """
        if not self.windowed:
            return context * self.position_bytes
        size = self.block_tokens
        return self.decode_blocks(context, size) * self.block_bytes(size)

    def max_tokens(self, num_blocks: int, block_size: int, step_tokens: int, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that `num_blocks` blocks hold."""
        low, high = 0, -(-limit // block_size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.max_blocks(middle * block_size, block_size, step_tokens) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(limit, low * block_size)


ONE_GROUP = KvLayout()
"""The layout of a model in which every layer sees everything."""


def held_kv_bytes(spec: ModelSpec, context: int) -> int:
    """Bytes of KV cache that the engine holds for one sequence of `context` tokens."""
    return kv_layout(spec).held_bytes(context)


def kv_layout(spec: ModelSpec) -> KvLayout:
    """The layout of the engine's cache for a model.

    A windowed group has about as many bytes as the layers that see everything, so that blocks are
    equal, without padding wherever the numbers divide. All layers form one group where they differ
    in their windows, or where most of the bytes belong to layers that see everything and blocks
    would be mostly padding.
    """
    own = {
        i: layer.attention
        for i, layer in enumerate(spec.layers)
        if layer.attention.delta is None and not layer.attention.shares_kv
    }
    if spec.kv_dtype == "int4" and not why_not_int4_kv(spec):
        return _int4_layout(spec)
    one_group = KvLayout(full=tuple(own), position_bytes=kv_bytes_per_token(spec))
    spans = {(a.window, a.chunk) for a in own.values() if a.window or a.chunk}
    if len(spans) != 1:
        return one_group
    window, chunk = spans.pop()
    if (window or chunk or 0) >= spec.max_positions:
        return one_group
    windowed = [i for i, a in own.items() if (a.window, a.chunk) == (window, chunk)]
    full = [i for i in own if i not in windowed]

    def size_of(layers: Sequence[int]) -> int:
        return sum(layer_kv_bytes(own[i], spec.kv_dtype) for i in layers)

    if size_of(full) > size_of(windowed):
        return one_group
    num_groups = min(len(windowed), -(-size_of(windowed) // (size_of(full) or size_of(windowed))))
    most = -(-len(windowed) // num_groups)
    num_groups = -(-len(windowed) // most)  # fewer groups may do without a larger one
    groups = tuple(tuple(windowed[j::num_groups]) for j in range(num_groups))
    return KvLayout(tuple(full), groups, window, chunk, max(map(size_of, (full, *groups))))


def _int4_layout(spec: ModelSpec) -> KvLayout:
    """Coded blocks of all layers, and recent blocks of every other layer.

    A recent row in INT8 is at most twice as large as a coded one, so that half of the layers fit a
    block. Windows give no blocks back.
    """
    layers = tuple(range(len(spec.layers)))
    position_bytes = layer_kv_bytes(spec.layers[0].attention, "int4") * 2 * -(-len(layers) // 2)
    return KvLayout(
        full=layers,
        windowed=tuple(half for half in (layers[0::2], layers[1::2]) if half),
        window=1,
        position_bytes=position_bytes,
        tile_tokens=1,
        block_tokens=KV_GROUP,
        recent=True,
    )
