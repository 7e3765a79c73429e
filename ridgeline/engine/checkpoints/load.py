"""From a model's name and spec to a decoder with its weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.checkpoints import QuantizedWeights, read_quantisation
from ridgeline.engine.checkpoints.family_layouts import XIELU_PARTS
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.mxfp4 import Mxfp4Weights
from ridgeline.engine.checkpoints.packed import PackedWeights
from ridgeline.engine.checkpoints.sources import (
    CPU,
    CheckpointWeights,
    DummyWeights,
    WeightSource,
)
from ridgeline.engine.checkpoints.tensor_names import EXPERT_NORMS, Part
from ridgeline.engine.dtype import DTYPES, is_exact
from ridgeline.engine.execution.layers import choose as choose_forward
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.execution.layers.torch_ops import TorchForward
from ridgeline.engine.kernels.native_linear import Packed, pack_lines
from ridgeline.engine.kernels.triton import why_not
from ridgeline.engine.model.base import DecoderBody, LayerBackend
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.model.delta_net import DeltaWeights, GatedAttentionLayer, GatedDeltaNet
from ridgeline.engine.model.layer_inputs import (
    AltUpBlock,
    AltUpWeights,
    HiddenStreams,
    InputBlock,
    InputGate,
    LayerInputs,
    SparseGatedMlp,
)
from ridgeline.engine.model.layers import (
    ACTIVATIONS,
    AttentionLayer,
    Block,
    ConcatLinear,
    GatedMlp,
    LatentAttention,
    Mixer,
    Norm,
    NormedLinear,
    ParallelBlock,
    QkHeadNorm,
    QkNorm,
    QkRowNorm,
    RmsNorm,
    ScaledBranch,
    UngatedMlp,
    Xielu,
    make_norm,
    no_norm,
    no_qk_norm,
)
from ridgeline.engine.model.moe import MoeMlp, NormedExperts, SeparateMlps, SharedExpertMlp
from ridgeline.engine.model.rope import RopeTables
from ridgeline.engine.model.shared_kv import NormedValueAttention, SharedKvAttention
from ridgeline.engine.model.table import EmbeddingTable, PackedTable, PlainTable
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.packed import PackedLinear, needs_cpu, take_digits
from ridgeline.engine.quant.ready import linear_of
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.json_files import file_errors
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.checkpoints.packed_config import PACKED_FILE
from ridgeline.modelspec.cost import shares_table, table_dtype
from ridgeline.modelspec.cost.parameters import qk_norm_shapes
from ridgeline.modelspec.format import FP32, Format
from ridgeline.modelspec.layer_inputs import kv_source, model_linears
from ridgeline.modelspec.model import (
    AltUpSpec,
    AttentionSpec,
    LatentSpec,
    LayerInputSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    SharedExpertSpec,
)


@file_errors()
def load_decoder(
    model: str,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    compute_dtype: torch.dtype,
    seed: int = 0,
    max_model_len: int | None = None,
    layer_backend: str = "auto",
) -> Decoder:
    """The decoder of `spec` with the weights of `model` (a directory, "demo", or "dummy:NAME").

    `seed` is for dummy weights. `max_model_len` (default: the model's limit) is the longest
    sequence that will run; it selects the factors of a longrope model. `layer_backend`: a name of
    `ridgeline.engine.execution.layers`. Raises BadModel, CannotRun.
    """
    device = torch.device(device)
    backend, _ = choose_forward(layer_backend, spec, device, compute_dtype)
    with torch.inference_mode(), open_weights(model, spec, seed, device) as weights:
        forward = layer_backend_of(backend)
        builder = DecoderBuilder(spec, weights, device, compute_dtype, forward)
        return builder.decoder(max_model_len or spec.max_positions)


def open_weights(
    model: str, spec: ModelSpec, seed: int, device: torch.device = CPU
) -> AbstractContextManager[WeightSource]:
    """The weight source of a model, chosen by the files in its folder; dummy weights are made on
    `device`. Raises BadModel.
    """
    if is_dummy(model):
        return nullcontext(DummyWeights(spec, seed, device))
    if is_gguf(model):
        return GgufWeights(model, spec)
    path = model_path(model)
    if (path / PACKED_FILE).is_file():
        return PackedWeights(path)
    foreign = read_quantisation(path)
    if foreign is not None and foreign.codec == "mxfp4":
        return Mxfp4Weights(path, spec)
    return (
        CheckpointWeights(path, spec) if foreign is None else QuantizedWeights(path, spec, foreign)
    )


class DecoderBuilder:
    """Reads parts in order, builds the layers, and counts the bytes kept."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        forward: LayerBackend = TorchForward,
    ) -> None:
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype
        self.forward = forward
        self.nbytes = 0

    def decoder(self, context: int) -> Decoder:
        spec = self.spec
        table = self._table()
        self.nbytes += table.nbytes
        ropes = list(dict.fromkeys(layer.attention.rope for layer in spec.layers))
        blocks = [self.block(layer, i, ropes) for i, layer in enumerate(spec.layers)]
        norm = self._norm("norm", (spec.hidden_size,), None)
        lm_head = self._lm_head(table)
        tables = RopeTables(ropes, context, self.dtype, self.device)
        body = DecoderBody(
            spec=spec,
            table=table,
            # Gemma rounds its scale to the dtype of the weights before multiplying.
            embed_scale=torch.tensor(spec.embed_scale, dtype=self.dtype).item(),
            blocks=tuple(blocks),
            norm=norm,
            ropes=tables,
            dtype=self.dtype,
            inputs=self._layer_inputs(),
            streams=self._hidden_streams(),
        )
        return Decoder(body, self.forward(body), lm_head, self.nbytes)

    def _table(self) -> EmbeddingTable:
        """The embedding table; packed, or in the narrowest dtype that loses nothing.

        A rewrite such as a rotation may have left the dtype that the checkpoint names.
        """
        spec = self.spec
        if spec.embed_format is not None:
            return self._packed_table(spec.embed_format)
        embed_VC = self._tensor("embed", (spec.vocab_size, spec.hidden_size))
        if shares_table(spec) and self.forward.storage_format(spec.lm_head.format) == FP32:
            return self._ordered_table(embed_VC)
        kept = DTYPES[table_dtype(spec)]
        return PlainTable(
            embed_VC.to(kept if is_exact(embed_VC, kept) else self.dtype).contiguous()
        )

    def _packed_table(self, format: Format) -> PackedTable:
        size = self.spec.vocab_size, self.spec.hidden_size
        linear = LinearSpec(num_out=size[0], num_in=size[1], format=format)
        needs_cpu(linear, self.device)
        packed = self.weights.packed(linear, ["embed"], None, None)
        assert isinstance(packed, Packed), "a spec with a packed table, and no such weights"
        return PackedTable(packed)

    def _ordered_table(self, embed_VC: Tensor) -> PackedTable:
        """The same numbers in the kernels' order, for the LM head that shares them."""
        lines = pack_lines("fp32", embed_VC.to(torch.float32), 0)
        num_tokens, width = embed_VC.shape
        return PackedTable(Packed("fp32", num_tokens, width, 0, lines))

    def _lm_head(self, table: EmbeddingTable) -> Linear:
        spec = self.spec
        if not spec.tied_embeddings:
            return self._linear(["lm_head"], [spec.lm_head], None)
        head = self._tied_head(_stored(spec.lm_head), table)
        take_digits(head, spec.lm_head.format.digits)
        return head

    def _tied_head(self, spec: LinearSpec, table: EmbeddingTable) -> Linear:
        shared = shares_table(self.spec)
        if isinstance(table, PackedTable) and shared:
            return PackedLinear(table.native.packed, None, self.dtype)
        ready = self._ready([spec], ["lm_head"], [None], None, None)
        if ready is not None:
            self.nbytes += ready.nbytes
            return ready
        assert isinstance(table, PlainTable)
        head = build_linear(spec, table.embed_VC, None, self.device, self.dtype)
        self.nbytes += 0 if shared else head.nbytes
        return head

    def block(self, layer: LayerSpec, index: int, ropes: list[RopeSpec]) -> Block:
        size = self.spec.hidden_size

        def norms(attention: str, mlp: str, present: bool) -> tuple[Norm, Norm]:
            if not present:
                return no_norm, no_norm
            first = self._norm(attention, (size,), index)
            return first, no_norm if layer.parallel else self._norm(mlp, (size,), index)

        before = norms("attention_norm", "mlp_norm", layer.norms != "after")
        mlp = self._mlp(layer.mlp, index)
        if layer.mlp.own_norms:
            mlp, before = self._separate(mlp, layer.mlp, before[1], index), (before[0], no_norm)
        after = norms("after_attention_norm", "after_mlp_norm", layer.norms != "before")
        if layer.residual_scale != 1.0:
            factor = layer.residual_scale
            after = ScaledBranch(after[0], factor), ScaledBranch(after[1], factor)
        block = (ParallelBlock if layer.parallel else Block)(
            self._mixer(layer.attention, index),
            mlp,
            before,
            after,
            ropes.index(layer.attention.rope),
        )
        return self._with_input(block, layer, index)

    def _with_input(self, block: Block, layer: LayerSpec, index: int) -> Block:
        """The block with its layer input, its output's scale and its hidden states, if any."""
        inputs, gate = layer.layer_input, None
        if inputs is not None:
            gate = InputGate(
                ACTIVATIONS[layer.mlp.activation],
                self._linear(["input_gate"], [inputs.gate], index),
                self._linear(["input_up"], [inputs.up], index),
                self._norm("input_norm", (self.spec.hidden_size,), index),
            )
        if layer.altup is not None:
            assert gate is not None
            return AltUpBlock(block, gate, self._altup(layer.altup, index))
        if gate is None and not layer.output_scale:
            return block
        scale = self._floats("output_scale", (1,), index).item() if layer.output_scale else 1.0
        return InputBlock(block, gate, scale)

    def _altup(self, altup: AltUpSpec, index: int) -> AltUpWeights:
        size, num = self.spec.hidden_size, altup.num_streams

        def weight(key: str, *shape: int) -> Tensor:
            found = self._tensor(key, shape, index).to(self.dtype)
            self.nbytes += found.nbytes
            return found

        return AltUpWeights(
            active=altup.active,
            router_norm=self._norm("altup_router_norm", (size,), index),
            router_NC=weight("altup_router", num, size),
            prediction_XN=weight("altup_prediction", num * num, num),
            correction_NN=weight("altup_correction", num, num),
            active_gain_C=weight("altup_gain", size) if altup.scales_active else None,
            laurel_down=self._linear(["laurel_down"], [altup.laurel_down], index),
            laurel_up=self._linear(["laurel_up"], [altup.laurel_up], index),
            laurel_norm=self._norm("laurel_norm", (size,), index),
        )

    def _layer_inputs(self) -> LayerInputs | None:
        inputs = self.spec.layers[0].layer_input
        if inputs is None:
            return None
        table = self._input_table(inputs)
        self.nbytes += table.nbytes
        return LayerInputs(
            table,
            torch.tensor(inputs.size**0.5, dtype=self.dtype).item(),
            self._around("input_projection"),
            self._norm("input_projection_norm", (inputs.size,), None),
            inputs.size,
        )

    def _input_table(self, inputs: LayerInputSpec) -> EmbeddingTable:
        """The rows of all layers; packed where the file has them so and the CPU computes."""
        shape = (inputs.vocab_size, len(self.spec.layers) * inputs.size)
        if inputs.table_format is not None and self.device.type == "cpu":
            linear = LinearSpec(num_out=shape[0], num_in=shape[1], format=inputs.table_format)
            packed = self.weights.packed(linear, ["input_table"], None, None)
            assert isinstance(packed, Packed), "a spec with a packed table, and no such weights"
            return PackedTable(packed)
        rows, wide = self._tensor("input_table", shape), DTYPES[self.spec.stored_dtype]
        return PlainTable(rows if rows.dtype.itemsize < wide.itemsize else rows.to(wide))

    def _hidden_streams(self) -> HiddenStreams | None:
        altup = self.spec.layers[0].altup
        if altup is None:
            return None
        places = range(altup.num_streams - 1)
        return HiddenStreams(
            [self._around(f"stream{i}") for i in places],
            [self._around(f"unstream{i}") for i in places],
        )

    def _around(self, key: str) -> Linear:
        """A linear outside the layers."""
        return self._linear([key], [model_linears(self.spec)[key]], None)

    def _latent_attention(self, spec: AttentionSpec, index: int) -> LatentAttention:
        latent = spec.latent
        assert latent is not None
        q_down: Callable[[Tensor], Tensor] = no_norm
        if latent.q_down is not None:
            down = self._linear(["q_down"], [latent.q_down], index)
            size = latent.q_down.num_out
            q_down = NormedLinear(down, self._latent_norm("q_down_norm", size, latent, index))
        q = self._linear(["q"], [spec.q], index)
        kv_down = self._linear(["kv_down"], [latent.kv_down], index)
        kv_norm = self._latent_norm("kv_down_norm", latent.rank, latent, index)
        shape = (spec.k.num_out + spec.v.num_out, latent.rank)
        up = LatentUp(spec, self._tensor("kv_up", shape, index).to(self.dtype))
        self.nbytes += up.nbytes
        return LatentAttention(
            spec, (q_down, q), kv_down, kv_norm, up, self._linear(["o"], [spec.o], index)
        )

    def _latent_norm(self, key: str, size: int, latent: LatentSpec, index: int) -> RmsNorm:
        norm = RmsNorm(self._tensor(key, (size,), index).to(self.dtype), latent.norm_eps)
        self.nbytes += norm.gain_C.nbytes
        return norm

    def _mixer(self, spec: AttentionSpec, index: int) -> Mixer:
        if spec.latent is not None:
            return self._latent_attention(spec, index)
        if spec.shares_kv:
            return self._shared_kv(spec, index)
        return self._attention(spec, index) if spec.delta is None else self._delta(spec, index)

    def _shared_kv(self, spec: AttentionSpec, index: int) -> SharedKvAttention:
        gain_D = self._norm("q_norm", (spec.head_dim,), index).gain_C
        norm_q = QkNorm(replace(spec, num_kv_heads=0), gain_D, gain_D, self.spec.norm_eps)
        q, o = self._linear(["q"], [spec.q], index), self._linear(["o"], [spec.o], index)
        return SharedKvAttention(spec, q, o, norm_q, kv_source(self.spec, index))

    def _normed_values(self, spec: AttentionSpec, index: int) -> NormedValueAttention:
        keys, specs = ["q", "k", "v"], [spec.q, spec.k, spec.v]
        num = 2 if spec.v_is_k else 3
        qkv = self._linear(keys[:num], specs[:num], index)
        o, norm_qk = self._linear(["o"], [spec.o], index), self._qk_norm(spec, index)
        return NormedValueAttention(spec, qkv, o, norm_qk, self.spec.norm_eps)

    def _delta(self, spec: AttentionSpec, index: int) -> GatedDeltaNet:
        delta = spec.delta
        assert delta is not None
        keys = ["delta_q", "delta_k", "delta_v", "delta_z"]
        heads = (delta.num_value_heads,)
        weights = DeltaWeights(
            conv_WT=self._floats("delta_conv", (delta.conv_width, 1, delta.conv_size), index)[:, 0],
            a_log_H=self._floats("delta_a_log", heads, index),
            dt_bias_H=self._floats("delta_dt_bias", heads, index),
            gain_V=self._floats("delta_gain", (delta.value_dim,), index),
        )
        self.nbytes += weights.nbytes
        return GatedDeltaNet(
            spec,
            self._linear(keys, [spec.q, spec.k, spec.v, delta.z], index),
            self._linear(["delta_b", "delta_a"], [delta.b, delta.a], index),
            self._linear(["delta_o"], [spec.o], index),
            weights,
            self.spec.norm_eps,
        )

    def _floats(self, key: str, shape: tuple[int, ...], index: int) -> Tensor:
        return self._tensor(key, shape, index).float()

    def _attention(self, spec: AttentionSpec, index: int) -> AttentionLayer | NormedValueAttention:
        if spec.v_norm:
            return self._normed_values(spec, index)
        kind = GatedAttentionLayer if spec.gated else AttentionLayer
        qkv = self._linear(["q", "k", "v"], [spec.q, spec.k, spec.v], index)
        o = self._linear(["o"], [spec.o], index)
        sinks_H = None
        if spec.sinks:
            sinks_H = self._tensor("sinks", (spec.num_heads,), index).to(self.dtype)
            self.nbytes += sinks_H.nbytes
        if not spec.qk_norm:
            return kind(spec, qkv, o, no_qk_norm, sinks_H)
        return kind(spec, qkv, o, self._qk_norm(spec, index), sinks_H)

    def _qk_norm(self, spec: AttentionSpec, index: int) -> Callable[[Tensor], None]:
        shapes, eps = qk_norm_shapes(spec), self.spec.norm_eps
        if spec.qk_norm_plain:
            ones_D = torch.ones(spec.head_dim, dtype=self.dtype, device=self.device)
            return QkNorm(spec, ones_D, ones_D, eps)
        q_gain, k_gain = (
            self._norm(key, shape, index).gain_C
            for key, shape in zip(("q_norm", "k_norm"), shapes, strict=True)
        )
        if spec.qk_norm_heads:
            return QkHeadNorm(q_gain, k_gain, eps)
        return (QkRowNorm if spec.qk_norm_rows else QkNorm)(spec, q_gain, k_gain, eps)

    def _mlp(self, spec: MlpSpec, index: int) -> Callable[[Tensor], Tensor]:
        if spec.router is not None:
            return self._moe(spec, index)
        if spec.gated:
            return self._gated_mlp(spec, index, spec.activation)
        up = self._linear(["up"], [spec.up], index)
        down = self._linear(["down"], [spec.down], index)
        act = None
        if spec.activation == "xielu":
            act = Xielu(*(self._tensor(key, shape, index) for key, shape in XIELU_PARTS.items()))
        return UngatedMlp(spec.activation, up, down, act)

    def _gated_mlp(
        self,
        spec: MlpSpec | SharedExpertSpec,
        index: int,
        activation: str,
        prefix: str = "",
        expert: int | None = None,
    ) -> GatedMlp:
        gate_up = self._linear(
            [f"{prefix}gate", f"{prefix}up"], [spec.gate, spec.up], index, expert
        )
        down = self._linear([f"{prefix}down"], [spec.down], index, expert)
        if isinstance(spec, MlpSpec) and spec.sparsity:
            return SparseGatedMlp(activation, gate_up, down, spec.sparsity)
        return GatedMlp(activation, gate_up, down)

    def _moe(self, spec: MlpSpec, index: int) -> MoeMlp | SharedExpertMlp:
        assert spec.router is not None
        router, correction_E = self._linear(["router"], [spec.router], index), None
        if spec.routing.correction:
            shape = (spec.router.num_out,)
            correction_E = self._tensor("router_correction", shape, index).float()
            self.nbytes += correction_E.nbytes
        act = spec.activation
        experts = [self._gated_mlp(spec, index, act, "expert_", e) for e in range(spec.num_experts)]
        routed = MoeMlp(spec, router, experts, correction_E)
        if self.device.type == "cuda" and not why_not(self.device):
            routed.stack()
        if spec.shared is None:
            return routed
        shared, own = self._gated_mlp(spec.shared, index, act, "shared_"), spec.shared.router
        scale = None if own is None else self._linear(["shared_router"], [own], index)
        return SharedExpertMlp(routed, shared, scale)

    def _separate(
        self, mlp: Callable[[Tensor], Tensor], spec: MlpSpec, before: Norm, index: int
    ) -> SeparateMlps:
        """Experts and the MLP next to them, each with its norms; `before` is that of the MLP."""
        assert isinstance(mlp, SharedExpertMlp)
        size, routed = self.spec.hidden_size, mlp.routed
        of_router, own, after, after_experts = (
            self._norm(key, (size,), index) for key in EXPERT_NORMS
        )
        of_router.gain_C = of_router.gain_C * size**-0.5
        scale_E = self._tensor("expert_scales", (spec.num_experts,), index).to(self.dtype)
        self.nbytes += scale_E.nbytes
        experts = NormedExperts(spec, routed.router, routed.experts, (of_router, own), scale_E)
        return SeparateMlps(experts, mlp.shared, (before, after), after_experts)

    def _norm(self, key: str, shape: tuple[int, ...], layer: int | None) -> RmsNorm:
        norm = make_norm(self.spec, self._tensor(key, shape, layer), self.dtype)
        self.nbytes += norm.gain_C.nbytes
        return norm

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        """One product for all `keys` if their formats agree, else one each, joined."""
        if len({(spec.num_in, spec.format, spec.bias) for spec in specs}) > 1:
            each = zip(keys, specs, strict=True)
            return ConcatLinear([self._linear([key], [spec], layer, expert) for key, spec in each])
        digits, specs = specs[0].format.digits, [_stored(spec) for spec in specs]
        biases = [
            self._tensor(f"{key}.bias", (spec.num_out,), layer, expert) if spec.bias else None
            for key, spec in zip(keys, specs, strict=True)
        ]
        linear = self._ready(specs, keys, biases, layer, expert)
        if linear is None:
            weights = [
                self._tensor(key, (spec.num_out, spec.num_in), layer, expert)
                for key, spec in zip(keys, specs, strict=True)
            ]
            stored = [replace(s, format=self.forward.storage_format(s.format)) for s in specs]
            linear = fuse(stored, weights, biases, self.device, self.dtype)
        take_digits(linear, digits)
        self.nbytes += linear.nbytes
        return linear

    def _ready(
        self,
        specs: list[LinearSpec],
        keys: list[str],
        biases: list[Tensor | None],
        layer: int | None,
        expert: int | None,
    ) -> Linear | None:
        """The product as packed by its source; None if it holds plain weights."""
        if len({(spec.num_in, spec.format, spec.bias) for spec in specs}) > 1:
            return None
        if self.device.type != "cpu":
            return None
        whole = whole_of(specs)
        packed = self.weights.packed(whole, keys, layer, expert)
        if packed is None:
            return None
        return linear_of(packed, joined(biases), self.dtype, whole.format.threshold)

    def _tensor(
        self, key: str, shape: tuple[int, ...], layer: int | None = None, expert: int | None = None
    ) -> Tensor:
        return self.weights.get(Part(key, shape, layer, expert)).to(self.device)


def _stored(spec: LinearSpec) -> LinearSpec:
    """The spec without activation precision, which does not affect the stored weight."""
    return replace(spec, format=spec.format.stored)


def fuse(
    specs: list[LinearSpec],
    weights: list[Tensor],
    biases: list[Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
) -> Linear:
    """One linear for weights of the same input, side by side; `Joined` if their formats differ."""
    alike = {(spec.num_in, spec.format, spec.bias) for spec in specs}
    if len(alike) > 1:
        each = zip(specs, weights, biases, strict=True)
        return ConcatLinear([build_linear(s, w, b, device, dtype) for s, w, b in each])
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return build_linear(whole_of(specs), weight, joined(biases), device, dtype)


def whole_of(specs: list[LinearSpec]) -> LinearSpec:
    """Linears of one input as one spec, outputs side by side."""
    first = specs[0]
    return LinearSpec(
        num_out=sum(spec.num_out for spec in specs),
        num_in=first.num_in,
        format=first.format,
        bias=first.bias,
    )


def joined(biases: list[Tensor | None]) -> Tensor | None:
    """The biases side by side; None if there are none."""
    kept = [bias for bias in biases if bias is not None]
    return torch.cat(kept) if kept else None
