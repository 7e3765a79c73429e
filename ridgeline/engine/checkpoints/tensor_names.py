"""The parts of a model, and where a checkpoint stores them.

A `Part` is one tensor as the decoder needs it (the q weight of layer 3); a `TensorLocation` says
which checkpoint tensor holds it: alone, as rows of a fused one (Phi-3's qkv_proj), or in a stack of
all experts. The layouts of the families are in `family_layouts`; the checkpoint shows which of them
it has.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor

from ridgeline.engine.checkpoints.family_layouts import (
    LAYOUTS,
    XIELU_PARTS,
    Layout,
    Shape,
    TensorLocation,
)
from ridgeline.modelspec.cost.parameters import qk_norm_shapes
from ridgeline.modelspec.layer_inputs import model_linears
from ridgeline.modelspec.model import (
    AttentionSpec,
    DeltaSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
)


class Part(NamedTuple):
    """One tensor of the decoder. `key` names its role; `layer` and `expert` if it has them."""

    key: str
    shape: Shape
    layer: int | None = None
    expert: int | None = None

    def __str__(self) -> str:
        where = "" if self.layer is None else f" of layer {self.layer}"
        return f"{self.key}{where}" + ("" if self.expert is None else f", expert {self.expert}")


EXPERT_NORMS = ("router_norm", "expert_norm", "after_shared_norm", "after_expert_norm")
"""Gains of experts with separate norms, in addition to that of the shared expert's input."""


def parts(spec: ModelSpec) -> Iterator[Part]:
    """Every tensor that the decoder needs, with its shape."""
    yield Part("embed", (spec.vocab_size, spec.hidden_size))
    yield from _parts_around(spec)
    for index, layer in enumerate(spec.layers):
        yield from _layer_parts(spec, layer, index)
    yield Part("norm", (spec.hidden_size,))
    if not spec.tied_embeddings:
        yield from _linear_parts("lm_head", spec.lm_head, None)


def _parts_around(spec: ModelSpec) -> Iterator[Part]:
    """What makes layer inputs and hidden states."""
    for key, linear in model_linears(spec).items():
        yield from _linear_parts(key, linear, None)
    inputs = spec.layers[0].layer_input
    if inputs is not None:
        yield Part("input_table", (inputs.vocab_size, len(spec.layers) * inputs.size))
        yield Part("input_projection_norm", (inputs.size,))


def _side_parts(spec: ModelSpec, layer: LayerSpec, index: int) -> Iterator[Part]:
    """A layer's input, its hidden states, and the scale of its output."""
    inputs, altup, size = layer.layer_input, layer.altup, spec.hidden_size
    if inputs is not None:
        yield from _linear_parts("input_gate", inputs.gate, index)
        yield from _linear_parts("input_up", inputs.up, index)
        yield Part("input_norm", (size,), index)
    if layer.output_scale:
        yield Part("output_scale", (1,), index)
    if altup is None:
        return
    num = altup.num_streams
    yield Part("altup_router_norm", (size,), index)
    yield Part("altup_router", (num, size), index)
    yield Part("altup_prediction", (num * num, num), index)
    yield Part("altup_correction", (num, num), index)
    if altup.scales_active:
        yield Part("altup_gain", (size,), index)
    yield from _linear_parts("laurel_down", altup.laurel_down, index)
    yield from _linear_parts("laurel_up", altup.laurel_up, index)
    yield Part("laurel_norm", (size,), index)


def _layer_parts(spec: ModelSpec, layer: LayerSpec, index: int) -> Iterator[Part]:
    attention, mlp = layer.attention, layer.mlp
    names = ["attention_norm", "mlp_norm"] if layer.norms != "after" else []
    names += ["after_attention_norm", "after_mlp_norm"] if layer.norms != "before" else []
    names = names[:1] if layer.parallel else names
    yield from (Part(name, (spec.hidden_size,), index) for name in names)
    if attention.latent is not None:
        yield from _latent_parts(attention, attention.latent, index)
    elif attention.delta is not None:
        yield from _delta_parts(attention, attention.delta, index)
    else:
        names = ["q", "o"] if attention.shares_kv else ["q", "k", "v", "o"]
        for name in names:
            if name != "v" or not attention.v_is_k:
                yield from _linear_parts(name, getattr(attention, name), index)
    yield from _side_parts(spec, layer, index)
    for name, shape in zip(("q_norm", "k_norm"), qk_norm_shapes(attention), strict=False):
        yield Part(name, shape, index)
    keys = ("gate", "up", "down") if mlp.gated else ("up", "down")
    if attention.sinks:
        yield Part("sinks", (attention.num_heads,), index)
    if mlp.activation == "xielu":
        yield from (Part(name, shape, index) for name, shape in XIELU_PARTS.items())
    if mlp.router is None:
        for name in keys:
            yield from _linear_parts(name, getattr(mlp, name), index)
        return
    yield from _linear_parts("router", mlp.router, index)
    if mlp.routing.correction:
        yield Part("router_correction", (mlp.num_experts,), index)
    if mlp.own_norms:
        yield Part("expert_scales", (mlp.num_experts,), index)
        yield from (Part(name, (spec.hidden_size,), index) for name in EXPERT_NORMS)
    if mlp.shared is not None:
        for name in ("gate", "up", "down", "router"):
            linear = getattr(mlp.shared, name)
            yield from () if linear is None else _linear_parts(f"shared_{name}", linear, index)
    for expert in range(mlp.num_experts):
        for name in keys:
            yield from _linear_parts(f"expert_{name}", getattr(mlp, name), index, expert)


def _latent_parts(attention: AttentionSpec, latent: LatentSpec, index: int) -> Iterator[Part]:
    if latent.q_down is not None:
        yield from _linear_parts("q_down", latent.q_down, index)
        yield Part("q_down_norm", (latent.q_down.num_out,), index)
    yield from _linear_parts("q", attention.q, index)
    yield from _linear_parts("kv_down", latent.kv_down, index)
    yield Part("kv_down_norm", (latent.rank,), index)
    # rows of keys and values alternate by head, so they are one part
    yield Part("kv_up", (attention.k.num_out + attention.v.num_out, latent.rank), index)
    yield from _linear_parts("o", attention.o, index)


def _delta_parts(attention: AttentionSpec, delta: DeltaSpec, index: int) -> Iterator[Part]:
    for name in ("q", "k", "v", "o"):
        yield from _linear_parts(f"delta_{name}", getattr(attention, name), index)
    for name in ("z", "b", "a"):
        yield from _linear_parts(f"delta_{name}", getattr(delta, name), index)
    yield Part("delta_conv", (delta.conv_width, 1, delta.conv_size), index)
    yield Part("delta_a_log", (delta.num_value_heads,), index)
    yield Part("delta_dt_bias", (delta.num_value_heads,), index)
    yield Part("delta_gain", (delta.value_dim,), index)


def _linear_parts(
    key: str, linear: LinearSpec, layer: int | None, expert: int | None = None
) -> Iterator[Part]:
    yield Part(key, (linear.num_out, linear.num_in), layer, expert)
    if linear.bias:
        yield Part(f"{key}.bias", (linear.num_out,), layer, expert)


_PREFIXES = (
    ("model.", "lm_head."),
    # base models, saved without their LM head's class
    ("", "lm_head."),
    # the text half of a multimodal model: as published first, and as transformers 5 writes it
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
    # of Idefics 3 and SmolVLM
    ("model.text_model.", "lm_head."),
)


def layouts_of(family: str, names: Container[str]) -> list[Layout]:
    """The layouts of a family, under the prefix that the tensors `names` of a checkpoint have."""
    prefixes = [p for p in _PREFIXES if f"{p[0]}embed_tokens.weight" in names] or _PREFIXES[:1]
    return [
        {key: _under(prefix, place) for key, place in layout.items()}
        for layout in LAYOUTS[family]
        for prefix in prefixes
    ]


def _under(prefix: tuple[str, str], place: TensorLocation) -> TensorLocation:
    template = place.template
    for old, new in zip(_PREFIXES[0], prefix, strict=True):
        if template.startswith(old):
            return place._replace(template=new + template.removeprefix(old))
    return place


class LocatedTensor(NamedTuple):
    """A part within the checkpoint: `rows` of `expert` in tensor `name` of shape `whole`.

    `transposed`: of the expert's matrix with its axes swapped. `num_groups`: how many
    groups the tensor's rows form; `rows` are those within each.
    """

    name: str
    whole: Shape
    rows: slice | None
    expert: int | None
    transposed: bool = False
    num_groups: int = 1

    def select(self, matrix: Tensor) -> Tensor:
        """The rows of the part, of a matrix with a row per output of the whole tensor."""
        rows = slice(None) if self.rows is None else self.rows
        if self.num_groups == 1:
            return matrix[rows]
        return matrix.view(self.num_groups, -1, matrix.shape[1])[:, rows].flatten(0, 1)

    def read(self, tensors: Any) -> Tensor:
        """The part from an open safetensors file."""
        if not self.whole:
            return cast(Tensor, tensors.get_tensor(self.name)).clone()
        view = tensors.get_slice(self.name)
        rows = slice(None) if self.rows is None else self.rows
        if self.num_groups > 1:
            return self.select(cast(Tensor, view[:]))
        if self.expert is None:
            return cast(Tensor, view[rows]).clone()
        if rows.step in (None, 1) and not self.transposed:
            return cast(Tensor, view[self.expert, rows]).clone()
        matrix = cast(Tensor, view[self.expert])
        return (matrix.T if self.transposed else matrix)[rows].contiguous()


def locate(part: Part, layout: Layout, sizes: Mapping[str, int]) -> LocatedTensor:
    """Where `part` is stored; for fused tensors, `sizes` gives the rows of each key."""
    place = layout[part.key]
    name = place.template.format(layer=part.layer, expert=part.expert)
    whole, rows = part.shape, None
    if place.fused:
        before = place.fused.index(part.key.removesuffix(".bias"))
        start = sum(sizes[key] for key in place.fused[:before])
        rows = slice(start, start + part.shape[0])
        if place.interleaved:
            rows = slice(before, None, len(place.fused))
        whole = (sum(sizes[key] for key in place.fused), *part.shape[1:])
        if place.grouped:
            num = sizes["delta_groups"]
            rows = slice(start // num, (start + part.shape[0]) // num)
            return LocatedTensor(name, whole, rows, None, num_groups=num)
    if not place.stacked:
        return LocatedTensor(name, whole, rows, None)
    transposed = place.transposed and len(whole) == 2
    whole = whole[::-1] if transposed else whole
    return LocatedTensor(name, (sizes["num_experts"], *whole), rows, part.expert, transposed)


def row_sizes(layer: LayerSpec) -> dict[str, int]:
    """Rows of every linear of a layer by key, and its number of experts."""
    attention, mlp = layer.attention, layer.mlp
    sizes = {name: getattr(attention, name).num_out for name in ("q", "k", "v", "o")}
    sizes |= {f"delta_{name}": sizes[name] for name in ("q", "k", "v")}
    if (delta := attention.delta) is not None:
        sizes |= {f"delta_{name}": getattr(delta, name).num_out for name in ("z", "b", "a")}
        sizes["delta_groups"] = delta.num_key_heads
    for name in ("gate", "up", "down"):
        sizes[name] = sizes[f"expert_{name}"] = getattr(mlp, name).num_out
    return {**sizes, "num_experts": mlp.num_experts}
