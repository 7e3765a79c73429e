"""What each rank of a parallel layout holds of a model.

    tp=2 cp=2

A rank has its part of the weights, and of the KV cache its key heads in its layers at its
positions (`modelspec.shard`).
"""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput
from ridgeline.modelspec.cost.kv_cache import kv_bytes_per_token
from ridgeline.modelspec.cost.weights import resident_weight_bytes
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.shard import ParallelSizes, Shard, shards_of

_NAMES = ("tp", "pp", "ep", "cp")
MAX_RANKS = 512


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one rank. `kv_bytes_per_token`: on average over the positions of a sequence."""

    rank: int
    layers: int
    query_heads: int
    kv_heads: int
    experts: int
    weight_bytes: int
    kv_bytes_per_token: float


class RankTable(msgspec.Struct, frozen=True, kw_only=True):
    """Every rank of a layout."""

    model: str
    layout: str
    ranks: tuple[RankPart, ...]


def rank_table(spec: ModelSpec, layout: str) -> RankTable:
    """What each rank of the layout in words (`parse_layout`) holds.

    Raises BadInput, and CannotRun if the model cannot be laid out like this.
    """
    sizes = parse_layout(layout)
    parts = [
        _part(own, Shard(sizes=sizes, rank=rank)) for rank, own in enumerate(shards_of(spec, sizes))
    ]
    return RankTable(model=spec.name, layout=str(sizes), ranks=tuple(parts))


def parse_layout(text: str) -> ParallelSizes:
    """The sizes in a text such as "tp=2 cp=2". Raises BadInput."""
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition("=")
        if name not in _NAMES or not number.isdecimal() or not 1 <= int(number) <= MAX_RANKS:
            raise BadInput(
                "a layout is given as sizes of tp, pp, ep and cp",
                value=word,
                limit=f"NAME=N with N in 1..{MAX_RANKS}",
                fix="for example 'tp=2 cp=2'",
            )
        sizes[name] = int(number)
    tp, pp, ep, cp = (sizes.get(name, 1) for name in _NAMES)
    found = ParallelSizes(tensor=tp, pipeline=pp, expert=ep, context=cp)
    if not sizes or found.num_ranks > MAX_RANKS:
        raise BadInput(
            "a layout has at least one size and not too many ranks",
            value=text,
            limit=f"{MAX_RANKS} ranks",
        )
    return found


def _part(own: ModelSpec, shard: Shard) -> RankPart:
    first = own.layers[0]
    return RankPart(
        rank=shard.rank,
        layers=len(own.layers),
        query_heads=first.attention.num_heads,
        kv_heads=first.attention.num_kv_heads,
        experts=max(layer.mlp.num_experts for layer in own.layers),
        weight_bytes=int(resident_weight_bytes(own)),
        kv_bytes_per_token=kv_bytes_per_token(own) / shard.sizes.context,
    )
