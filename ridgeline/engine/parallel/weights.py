"""The part of a model's weights that one rank holds, cut from what its source stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from ridgeline.engine.checkpoints.sources import CheckpointWeights, DummyWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.parallel.packed import cut_inputs, cut_outputs
from ridgeline.engine.quant.ready import Ready
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import LayerSpec, LinearSpec, MlpSpec, ModelSpec, SharedExpertSpec
from ridgeline.modelspec.shard import Shard, Span

ROWS, COLUMNS = 0, 1


class Cut(NamedTuple):
    """A range along one axis of a tensor."""

    axis: int
    span: Span


class ShardedWeights:
    """The weight source of one rank: `get` takes the shapes and numbers of the rank's spec.

    `spec` is the whole model. Of a plain tensor in a checkpoint only the rank's part is read; fused
    and stacked ones are read whole, and cut.
    """

    def __init__(self, inner: WeightSource, spec: ModelSpec, shard: Shard) -> None:
        self.inner, self.spec, self.shard = inner, spec, shard
        self._first_layer = shard.layers(spec).start
        self._whole = {(p.key, p.layer, p.expert): p for p in parts(spec)}
        if spec.tied_embeddings:
            embed = self._whole["embed", None, None]
            self._whole["lm_head", None, None] = embed._replace(key="lm_head")

    def get(self, part: Part) -> Tensor:
        whole, cut = self.locate(part)
        if cut is None or len(cut.span) == whole.shape[cut.axis]:
            tensor = self.inner.get(whole)
        else:
            tensor = self._read(whole, cut)
        assert tuple(tensor.shape) == part.shape, (part, tuple(tensor.shape))
        return tensor

    def whole(self, part: Part) -> Tensor:
        """The tensor of which `part` is this rank's."""
        return self.inner.get(self.locate(part)[0])

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """This rank's part of a product that its source has packed; None if it is plain there."""
        ready = self.whole_packed(spec, keys, layer, expert)
        if ready is None:
            return None
        located = [self.locate(Part(key, (), layer, expert)) for key in keys]
        if all(cut is None or len(cut.span) == whole.shape[cut.axis] for whole, cut in located):
            return ready
        if not isinstance(ready, Packed):
            raise CannotRun(
                "weights with inputs in another order or kept apart are not cut between ranks",
                value="+".join(keys),
                fix="use --pipeline-parallel-size",
            )
        columns = [cut.span for _, cut in located if cut is not None and cut.axis == COLUMNS]
        if columns:
            return cut_inputs(ready, columns[0])
        spans, before = [], 0
        for whole, cut in located:
            own = Span(0, whole.shape[0]) if cut is None else cut.span
            spans.append(Span(before + own.start, before + own.stop))
            before += whole.shape[0]
        return cut_outputs(ready, spans)

    def whole_packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """The product of which `spec` describes this rank's part, as its source has packed it."""
        if isinstance(self.inner, DummyWeights):
            return None  # its packed weights are random numbers that belong to no whole
        whole = [self.locate(Part(key, (), layer, expert))[0] for key in keys]
        num_out, num_in = sum(part.shape[0] for part in whole), whole[0].shape[1]
        spec = msgspec.structs.replace(spec, num_out=num_out, num_in=num_in)
        return self.inner.packed(spec, keys, whole[0].layer, whole[0].expert)

    def locate(self, part: Part) -> tuple[Part, Cut | None]:
        """The whole model's part, and the cut (None: the rank holds all of it)."""
        layer = None if part.layer is None else part.layer + self._first_layer
        expert = part.expert
        if expert is not None:
            assert layer is not None
            expert += self.shard.experts(self.spec.layers[layer].mlp).start
        whole = self._whole[part.key, layer, expert]
        if layer is None:
            rows = self.shard.vocabulary(self.spec)
            return whole, None if part.key == "norm" else Cut(ROWS, rows)
        return whole, cut_of(part.key, self.spec.layers[layer], self.shard)

    def _read(self, whole: Part, cut: Cut) -> Tensor:
        start, stop = cut.span.start, cut.span.stop
        if isinstance(self.inner, CheckpointWeights):
            at = self.inner.located[whole]
            if at.rows is None and at.expert is None and not at.transposed:
                view = self.inner.files[self.inner.entries[at.name].file].get_slice(at.name)
                read: Tensor = view[start:stop] if cut.axis == ROWS else view[:, start:stop]
                return read.clone()
        return self.inner.get(whole).narrow(cut.axis, start, stop - start).clone()


def cut_of(key: str, layer: LayerSpec, shard: Shard) -> Cut | None:
    """What a rank holds of the tensor `key` of a layer (None: all of it)."""
    if shard.sizes.tensor == 1:
        return None
    name, _, bias = key.partition(".")
    attention, mlp = layer.attention, layer.mlp
    queries, keys = shard.heads(attention)
    of_heads = {
        "q": queries.times(attention.q.num_out // attention.num_heads),
        "sinks": queries,
        "kv_up": queries.times((attention.k.num_out + attention.v.num_out) // attention.num_heads),
        "q_norm": queries,
        "k_norm": keys,
    }
    if attention.latent is None and attention.num_kv_heads:
        of_heads["k"] = keys.times(attention.k.num_out // attention.num_kv_heads)
        of_heads["v"] = keys.times(attention.v.num_out // attention.num_kv_heads)
    if name in ("q_norm", "k_norm") and not attention.qk_norm_heads:
        return None
    if name in of_heads:
        return Cut(ROWS, of_heads[name])
    if name == "o":
        inputs = queries.times(attention.o.num_in // attention.num_heads)
        return None if bias else Cut(COLUMNS, inputs)
    prefix, _, matrix = name.rpartition("_")
    if matrix not in ("gate", "up", "down") or prefix not in ("", "shared", "expert"):
        return None
    owner: MlpSpec | SharedExpertSpec | None = mlp.shared if prefix == "shared" else mlp
    if owner is None or (prefix == "expert" and not shard.cuts_experts()):
        return None
    width = shard.width(owner.down)
    if matrix != "down":
        return Cut(ROWS, width)
    return None if bias else Cut(COLUMNS, width)
