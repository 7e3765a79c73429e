"""Parallel layouts of a model over processes: the spec of what one rank holds.

    tensor    heads, feed-forward width and vocabulary split over the ranks of a stage
    pipeline  the layers in stages, which pass hidden states on
    expert    whole experts on each rank of a stage
    context   the positions of the KV cache, in chunks that the ranks of a stage have in turn
    sequence  norms and residuals on a part of the rows, where `tensor` splits what lies between

A stage has max(tensor · context, expert) ranks. Ranks count stage by stage, and within a stage by
context: rank = stage · ranks of a stage + place, place = context index · tensor + tensor index.
Ranks of one context index are a tensor group, those of one tensor index a context group. With
tensor 1 and expert N, attention is computed by every rank of a stage. Ranks of a context group have
the same weights, apart from experts.

Heads are split by key head, so that a query head stays with the key head that it reads. Numbers
that do not divide are split as evenly as possible, the first ranks taking one more. With more ranks
than key heads, several ranks hold the same key head and its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    SharedExpertSpec,
)

Gated = TypeVar("Gated", MlpSpec, SharedExpertSpec)

VOCABULARY_MULTIPLE = 16
"""Rows of the LM head are split at multiples of a panel of the kernels."""


ACTIVATION_MULTIPLE = 32
"""Feed-forward layers are split at multiples of two vectors where they are wide enough: torch
rounds the last numbers of a row, which fill no vector, in another way."""

CHUNK_TOKENS = 512
"""Positions that native attention sums before it merges (kChunkKeys in
native/attention/attention.h): cut between them, a context is added up in the same order."""


class Span(msgspec.Struct, frozen=True):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, factor: int) -> Span:
        """The range in units that are `factor` times smaller."""
        return Span(self.start * factor, self.stop * factor)


def split(size: int, parts: int, index: int, multiple: int = 1) -> Span:
    """The `index`-th of `parts` ranges that cover `size`, cut at multiples of `multiple`.

    The rest behind the last multiple belongs to the last range, if every range has a multiple:
    products with very few rows may be computed by another kernel, in other bits.
    """
    units = size // multiple
    if units < parts:
        units = -(-size // multiple)
    base, more = divmod(units, parts)
    start = index * base + min(index, more)
    stop = start + base + (index < more)
    if index == parts - 1:
        return Span(min(size, start * multiple), size)
    return Span(min(size, start * multiple), min(size, stop * multiple))


class ParallelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of tensor, pipeline, expert and context parallelism.

    `sequence`: ranks that split heads and widths each normalise a part of the rows.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    sequence: bool = False

    @property
    def stage_ranks(self) -> int:
        """Ranks that compute the layers of one stage together."""
        return max(self.tensor * self.context, self.expert)

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.stage_ranks

    def __str__(self) -> str:
        names = {"tp": self.tensor, "pp": self.pipeline, "ep": self.expert, "cp": self.context}
        parts = [f"{name}{size}" for name, size in names.items() if size > 1] or ["tp1"]
        return " ".join([*parts, "sp"] if self.sequence else parts)


class Members(NamedTuple):
    """Ranks that exchange tensors: `size` of them from `first`, every `stride`-th one.

    `place`: which of them a rank is.
    """

    first: int
    stride: int
    size: int
    place: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that one rank of a layout holds."""

    sizes: ParallelSizes
    rank: int

    @property
    def stage(self) -> int:
        return self.rank // self.sizes.stage_ranks

    @property
    def place(self) -> int:
        """Index among the ranks of the stage."""
        return self.rank % self.sizes.stage_ranks

    @property
    def tensor_index(self) -> int:
        """Index among the ranks that split heads and widths."""
        return self.place % self.sizes.tensor

    @property
    def context_index(self) -> int:
        """Index among the ranks that divide the positions of the KV cache."""
        return self.place // self.sizes.tensor % self.sizes.context

    @property
    def stage_members(self) -> Members:
        """The ranks of the stage."""
        return Members(self.rank - self.place, 1, self.sizes.stage_ranks, self.place)

    @property
    def tensor_members(self) -> Members:
        """The ranks with the same positions of the KV cache and other heads."""
        index = self.tensor_index
        return Members(self.rank - index, 1, self.sizes.tensor, index)

    @property
    def context_members(self) -> Members:
        """The ranks with the same heads and other positions of the KV cache."""
        stride, index = self.sizes.tensor, self.context_index
        return Members(self.rank - index * stride, stride, self.sizes.context, index)

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.sizes.pipeline - 1

    def layers(self, spec: ModelSpec) -> Span:
        """The layers of the stage. Later stages take the remainder: the first has the LM head."""
        sizes = self.sizes
        mirrored = split(len(spec.layers), sizes.pipeline, sizes.pipeline - 1 - self.stage)
        return Span(len(spec.layers) - mirrored.stop, len(spec.layers) - mirrored.start)

    def vocabulary(self, spec: ModelSpec, place: int | None = None) -> Span:
        """Rows of the embedding table and the LM head at `place` (None: this rank's)."""
        place = self.place if place is None else place
        return split(spec.vocab_size, self.sizes.stage_ranks, place, VOCABULARY_MULTIPLE)

    def heads(self, attention: AttentionSpec) -> tuple[Span, Span]:
        """Query heads and key heads."""
        tensor, index = self.sizes.tensor, self.tensor_index
        if attention.latent is not None or attention.delta is not None:
            return split(attention.num_heads, tensor, index), Span(0, attention.num_kv_heads)
        num_keys = attention.num_kv_heads
        group = attention.num_heads // num_keys
        if tensor <= num_keys:
            keys = split(num_keys, tensor, index)
            return keys.times(group), keys
        sharers = tensor // num_keys
        key = index // sharers
        queries = split(group, sharers, index % sharers)
        return Span(key * group + queries.start, key * group + queries.stop), Span(key, key + 1)

    def width(self, down: LinearSpec) -> Span:
        """Inputs of a feed-forward layer's last product, whose groups are not cut."""
        multiple = _multiple(down.format)
        if multiple == 1 and down.num_in >= ACTIVATION_MULTIPLE * self.sizes.tensor:
            multiple = ACTIVATION_MULTIPLE
        return split(down.num_in, self.sizes.tensor, self.tensor_index, multiple)

    def experts(self, mlp: MlpSpec) -> Span:
        """The routed experts that this rank computes."""
        index = self.place if self.sizes.expert > 1 else 0
        return split(mlp.num_experts, self.sizes.expert, index)

    def cuts_experts(self) -> bool:
        """Whether each expert's matrices are split over the ranks of a stage."""
        return self.sizes.tensor > 1 and self.sizes.expert == 1


def _multiple(format: Format) -> int:
    return format.span or format.group_size or 1


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model as one rank holds it. Raises CannotRun if the layout does not suit the model."""
    check_sizes(spec, shard.sizes)
    layers = shard.layers(spec)
    rows = len(shard.vocabulary(spec))
    return replace(
        spec,
        layers=tuple(_layer(layer, shard) for layer in spec.layers[layers.start : layers.stop]),
        vocab_size=rows,
        lm_head=replace(spec.lm_head, num_out=rows),
        rewrites=(*spec.rewrites, f"rank {shard.rank} of {shard.sizes}"),
    )


class NodeAddress(NamedTuple):
    """Where node 0 waits for the ranks of other nodes."""

    host: str
    port: int

    @staticmethod
    def parse(text: str | None) -> NodeAddress:
        """From HOST:PORT. Raises BadInput."""
        host, _, port = (text or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise BadInput(
                "--master-addr is no address of node 0", value=text, limit="HOST:PORT, PORT < 65535"
            )
        return NodeAddress(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def ranks_of_node(sizes: ParallelSizes, num_nodes: int, node: int) -> range:
    """The ranks that a node computes: consecutive ones, as evenly as possible."""
    span = split(sizes.num_ranks, num_nodes, node)
    return range(span.start, span.stop)


def shards_of(spec: ModelSpec, sizes: ParallelSizes) -> list[ModelSpec]:
    """The model as each rank holds it; the model itself if there is one."""
    if sizes.num_ranks == 1:
        return [spec]
    ranks = range(sizes.num_ranks)
    return [shard_spec(spec, Shard(sizes=sizes, rank=rank)) for rank in ranks]


def _layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    if shard.sizes.stage_ranks == 1:
        return layer
    return replace(layer, attention=_attention(layer.attention, shard), mlp=_mlp(layer.mlp, shard))


def _attention(attention: AttentionSpec, shard: Shard) -> AttentionSpec:
    if shard.sizes.tensor == 1:
        return attention
    queries, keys = shard.heads(attention)
    num, num_keys = attention.num_heads, attention.num_kv_heads
    of_keys = (len(keys), num_keys) if attention.latent is None else (len(queries), num)
    return replace(
        attention,
        num_heads=len(queries),
        num_kv_heads=len(keys),
        q=_rows(attention.q, len(queries), num),
        k=_rows(attention.k, *of_keys),
        v=_rows(attention.v, *of_keys),
        o=replace(attention.o, num_in=attention.o.num_in // num * len(queries)),
    )


def _rows(linear: LinearSpec, num: int, whole: int) -> LinearSpec:
    return replace(linear, num_out=linear.num_out // whole * num)


def _mlp(mlp: MlpSpec, shard: Shard) -> MlpSpec:
    if mlp.num_experts:
        experts = len(shard.experts(mlp))
        shared = None if mlp.shared is None else _gated(mlp.shared, shard)
        mlp = replace(mlp, num_experts=experts, shared=shared)
        return _gated(mlp, shard) if shard.cuts_experts() else mlp
    return _gated(mlp, shard)


def _gated(mlp: Gated, shard: Shard) -> Gated:
    width = len(shard.width(mlp.down))
    return replace(
        mlp,
        gate=replace(mlp.gate, num_out=width),
        up=replace(mlp.up, num_out=width),
        down=replace(mlp.down, num_in=width),
    )


def check_sizes(spec: ModelSpec, sizes: ParallelSizes) -> None:
    """Raise CannotRun, with every reason, if the model cannot be laid out like this."""
    reasons = list(dict.fromkeys(_reasons(spec, sizes)))
    if reasons:
        raise CannotRun(
            f"{spec.name} cannot be laid out over {sizes.num_ranks} ranks: {'; '.join(reasons)}",
            value=str(sizes),
        )


def _reasons(spec: ModelSpec, sizes: ParallelSizes) -> Iterator[str]:
    if sizes.pipeline > len(spec.layers):
        yield f"{sizes.pipeline} stages need as many layers, and it has {len(spec.layers)}"
    elif sizes.pipeline > 1 and any(layer.attention.shares_kv for layer in spec.layers):
        yield "layers share the KV cache of an earlier layer, which may be in another stage"
    if sizes.expert > 1:
        yield from _expert_reasons(spec, sizes)
    if sizes.context > 1:
        yield from _context_reasons(spec)
    if sizes.sequence and sizes.tensor == 1:
        yield "--sequence-parallel divides the rows between the ranks of --tensor-parallel-size"
    if sizes.tensor > 1:
        for layer in spec.layers:
            yield from _attention_reasons(layer.attention, sizes.tensor)
            yield from _mlp_reasons(layer.mlp, sizes)


def _expert_reasons(spec: ModelSpec, sizes: ParallelSizes) -> Iterator[str]:
    experts = [layer.mlp.num_experts for layer in spec.layers if layer.mlp.num_experts]
    others = sizes.tensor * sizes.context
    if others not in (1, sizes.expert):
        yield (
            f"--expert-parallel-size {sizes.expert} is not the {others} ranks that tensor and"
            " context parallelism make together (or those are off)"
        )
    if not experts:
        yield "it has no experts to distribute"
    elif min(experts) < sizes.expert:
        yield f"--expert-parallel-size {sizes.expert} exceeds its {min(experts)} experts"


def _context_reasons(spec: ModelSpec) -> Iterator[str]:
    if spec.max_positions <= CHUNK_TOKENS:
        yield f"its {spec.max_positions} positions are no more than one chunk of {CHUNK_TOKENS}"
    for layer in spec.layers:
        attention = layer.attention
        if attention.delta is not None:
            yield "a gated delta net keeps one state, which has no positions to divide"
        elif attention.latent is not None or attention.chunk is not None:
            yield "latent and chunked attention have no native kernel, whose sums ranks can share"
        elif attention.shares_kv:
            yield "layers share the KV cache of an earlier layer"


def _attention_reasons(attention: AttentionSpec, tensor: int) -> Iterator[str]:
    if attention.delta is not None:
        yield "the heads of a gated delta net are not split (--pipeline-parallel-size divides it)"
        return
    if attention.qk_norm_rows:
        yield "q and k are normalised over all heads, which no rank has"
    num_heads, num_keys = attention.num_heads, attention.num_kv_heads
    if tensor > num_heads:
        yield f"--tensor-parallel-size {tensor} exceeds its {num_heads} heads"
    elif attention.latent is None and tensor > num_keys and tensor % num_keys:
        yield (
            f"--tensor-parallel-size {tensor} is neither at most its {num_keys} key heads nor a"
            " multiple of them"
        )
    elif not _keeps_groups(attention, tensor):
        yield "heads would cut a group of the output projection's weights that share a scale"


def _keeps_groups(attention: AttentionSpec, tensor: int) -> bool:
    """Whether the output projection is cut between groups of inputs that share a scale."""
    size, multiple = attention.o.num_in // attention.num_heads, _multiple(attention.o.format)
    sizes = ParallelSizes(tensor=tensor)
    shards = [Shard(sizes=sizes, rank=rank) for rank in range(tensor)]
    return all(shard.heads(attention)[0].start * size % multiple == 0 for shard in shards)


def _mlp_reasons(mlp: MlpSpec, sizes: ParallelSizes) -> Iterator[str]:
    cut: Sequence[LinearSpec] = () if mlp.shared is None else (mlp.shared.down,)
    if not mlp.num_experts or sizes.expert == 1:
        cut = (*cut, mlp.down)
    for down in cut:
        if -(-down.num_in // _multiple(down.format)) < sizes.tensor:
            yield f"a feed-forward layer has too few groups of weights for {sizes.tensor} ranks"
    if mlp.num_experts and sizes.expert == 1 and mlp.down.format.kind == "int8":
        yield (
            "int8 experts round a row of activations as a whole, so they cannot be cut"
            f" (use --expert-parallel-size {sizes.tensor})"
        )
