"""Builds the part of a decoder that one rank computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.engine.checkpoints.load import DecoderBuilder, open_weights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.execution.layers.torch_ops import TorchForward
from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.model.base import DecoderBody, LayerBackend
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.model.layers import Block
from ridgeline.engine.model.moe import MoeMlp, SharedExpertMlp
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.model.table import EmbeddingTable
from ridgeline.engine.parallel.exchange.base import Collectives
from ridgeline.engine.parallel.layers.experts import ExpertParallelMlp
from ridgeline.engine.parallel.layers.forward import NoTable, RankForward
from ridgeline.engine.parallel.layers.linears import (
    RowParallelInt8,
    RowParallelLinear,
    SummedMlp,
    VocabularyTable,
)
from ridgeline.engine.parallel.layers.native_forward import NativeRankForward
from ridgeline.engine.parallel.layers.rows import (
    AllRows,
    GatheredNorm,
    OwnRows,
    OwnRowsOf,
    RowSums,
    StepRows,
)
from ridgeline.engine.parallel.messages import RankConfig
from ridgeline.engine.parallel.packed import unpack_integers
from ridgeline.engine.parallel.weights import COLUMNS, ShardedWeights, cut_of
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.int8.quantise import quantise
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.json_files import file_errors
from ridgeline.modelspec.model import LayerSpec, LinearSpec, MlpSpec, ModelSpec, RopeSpec
from ridgeline.modelspec.shard import Shard, shard_spec


@file_errors()
def load_rank(config: RankConfig, collectives: Collectives) -> Decoder:
    """The decoder of one rank, with its part of the weights.

    On ranks other than 0 of the first stage, `forward` is all that the decoder is for; in later
    stages it has no table and no head. Raises BadModel, CannotRun.
    """
    shard, dtype = config.shard, DTYPES[config.dtype]
    backend = layer_backend_of(config.layer_backend)
    with torch.inference_mode(), open_weights(config.model, config.spec, config.seed) as source:
        weights = ShardedWeights(source, config.spec, shard)
        builder = RankBuilder(
            config.spec, shard, weights, collectives, dtype, backend, torch.device(config.device)
        )
        return builder.decoder(config.max_model_len)


CPU = torch.device("cpu")


class RankBuilder(DecoderBuilder):
    """A `DecoderBuilder` for the layers, heads, experts and rows of one rank.

    `storage` is the layer backend whose storage formats the linears take.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        weights: ShardedWeights,
        collectives: Collectives,
        dtype: torch.dtype,
        storage: LayerBackend,
        device: torch.device = CPU,
    ) -> None:
        own = shard_spec(spec, shard)
        super().__init__(own, weights, device, dtype, storage)
        self.whole, self.shard, self.sharded = spec, shard, weights
        self.collectives = collectives
        divides_context = shard.sizes.context > 1 and self.forward is not TorchForward
        self.rows = StepRows(shard, collectives, divides_context)
        self.all_rows = AllRows(collectives)
        self.own_rows = OwnRows(collectives, self.rows)

    @property
    def sums(self) -> RowSums:
        """How the ranks that split a layer's inputs add their products."""
        return self.own_rows if self.shard.sizes.sequence else self.all_rows

    def decoder(self, context: int) -> Decoder:
        spec, shard = self.spec, self.shard
        table: EmbeddingTable = NoTable(self.device)
        if shard.is_first_stage:
            inner = self._table()
            self.nbytes += inner.nbytes
            table = inner
            if shard.sizes.stage_ranks > 1:
                table = VocabularyTable(inner, shard.vocabulary(self.whole), self.collectives)
        ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        blocks = tuple(self.block(layer, i, ropes) for i, layer in enumerate(spec.layers))
        norm = self._norm("norm", (spec.hidden_size,), None)
        head: Linear = self._lm_head(inner) if shard.is_first_stage else NoTable(self.device)
        body = DecoderBody(
            spec=replace(spec, vocab_size=self.whole.vocab_size),
            table=table,
            embed_scale=torch.tensor(spec.embed_scale, dtype=self.dtype).item(),
            blocks=blocks,
            norm=norm,
            ropes=RopeTables(ropes, context, self.dtype, self.device),
            dtype=self.dtype,
        )
        kind = RankForward if self.forward is TorchForward else NativeRankForward
        forward = kind(body, shard, self.collectives, self.rows)
        return Decoder(body, forward, head, self.nbytes)

    def block(self, layer: LayerSpec, index: int, ropes: list[RopeSpec]) -> Block:
        block = super().block(layer, index, ropes)
        if self.shard.sizes.sequence:
            block.attention_norm = GatheredNorm(block.attention_norm, self.rows)
            block.mlp_norm = GatheredNorm(block.mlp_norm, self.rows)
        return block

    def _mlp(self, spec: MlpSpec, index: int) -> Callable[[Tensor], Tensor]:
        mlp = super()._mlp(spec, index)
        if self._sums_experts(spec):
            return SummedMlp(mlp, self.sums)
        if self.shard.sizes.sequence and spec.num_experts:
            return OwnRowsOf(mlp, self.own_rows)
        return mlp

    def _sums_experts(self, spec: MlpSpec) -> bool:
        return bool(spec.num_experts) and self.shard.cuts_experts()

    def _moe(self, spec: MlpSpec, index: int) -> MoeMlp | SharedExpertMlp:
        moe = super()._moe(spec, index)
        if self.shard.sizes.expert == 1:
            return moe
        whole = self._layer(index).mlp
        inner = moe.routed if isinstance(moe, SharedExpertMlp) else moe
        routed = ExpertParallelMlp(
            whole,
            inner.router,
            inner.experts,
            inner.correction_E,
            self.shard.experts(whole),
            self.collectives,
        )
        if isinstance(moe, SharedExpertMlp):
            return SharedExpertMlp(routed, moe.shared, moe.router)
        return routed

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        if layer is None or len(keys) > 1 or not self._is_cut(keys[0], layer):
            return super()._linear(keys, specs, layer, expert)
        (key,), (spec,) = keys, specs
        summed_outside = key != "o" and self._sums_experts(self.spec.layers[layer].mlp)
        if summed_outside:
            # The whole layers' outputs are added, so that one of them has the bias.
            own = replace(spec, bias=spec.bias and self.shard.tensor_index == 0)
            return super()._linear([key], [own], layer, expert)
        bias_O = None
        if spec.bias:
            bias_O = self._tensor(f"{key}.bias", (spec.num_out,), layer)
        if spec.format.kind == "int8":
            return self._integer_rows(key, spec, bias_O, layer)
        inner = super()._linear([key], [replace(spec, bias=False)], layer, expert)
        self.nbytes += 0 if bias_O is None else bias_O.nbytes
        bias_O = None if bias_O is None else bias_O.to(self.dtype)
        return RowParallelLinear(inner, bias_O, self._sums_of(key, layer))

    def _sums_of(self, key: str, layer: int) -> RowSums:
        """A shared expert is added to the outputs of experts, which every rank has of all rows."""
        is_shared = key != "o" and bool(self.spec.layers[layer].mlp.num_experts)
        return self.all_rows if is_shared else self.sums

    def _is_cut(self, key: str, layer: int) -> bool:
        if self.shard.sizes.tensor == 1:
            return False
        cut = cut_of(key, self._layer(layer), self.shard)
        return cut is not None and cut.axis == COLUMNS

    def _integer_rows(
        self, key: str, spec: LinearSpec, bias_O: Tensor | None, layer: int
    ) -> RowParallelInt8:
        """This rank's columns of a weight whose rows are rounded as a whole."""
        if spec.format.digits > 1 or spec.format.wide or spec.format.threshold:
            raise CannotRun(
                "tensor parallelism multiplies int8 activations with int8 weights only",
                value=spec.format,
                fix="leave out --activations",
            )
        part = Part(key, (spec.num_out, spec.num_in), layer)
        cut = cut_of(key, self._layer(layer), self.shard)
        assert cut is not None
        stored = replace(spec, format=spec.format.stored, bias=False)
        packed = self.sharded.whole_packed(stored, [key], layer, None)
        if packed is None:
            q_OI, scale_O = quantise(self.sharded.whole(part), "full")
        else:
            assert isinstance(packed, Packed), "plain int8 weights"
            q_OI, scale_O = unpack_integers(packed)
        own_OI = q_OI[:, cut.span.start : cut.span.stop].contiguous()
        linear = RowParallelInt8(
            own_OI,
            scale_O,
            bias_O,
            self.collectives.tensor,
            self._sums_of(key, layer),
            self.dtype,
        )
        self.nbytes += linear.nbytes
        return linear

    def _layer(self, index: int) -> LayerSpec:
        """The whole model's layer."""
        return self.whole.layers[self.shard.layers(self.whole).start + index]
