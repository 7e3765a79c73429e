"""The spec of a GGUF file: how each of its tensors is computed."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_architectures.config import gguf_config
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import EXPERTS, ROUTER, architecture_of
from ridgeline.modelspec.checkpoints.gguf_header import Gguf, GgufTensor, read_gguf
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.format import Format, blocks, blocks_of_all, dense
from ridgeline.modelspec.model import LayerSpec, LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears, map_linears

_MODULES = {
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.z": "attn_gate",
    "attention.q_down": "attn_q_a",
    "attention.kv_down": "attn_kv_a_mqa",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.shared_gate": "ffn_gate_shexp",
    "mlp.shared_up": "ffn_up_shexp",
    "mlp.shared_down": "ffn_down_shexp",
    "router": "ffn_gate_inp",
    "shared_router": "ffn_gate_inp_shexp",
}
_OF_EXPERTS = ("mlp.gate", "mlp.up", "mlp.down")
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_q_b": ("attn_q",),
    "ssm_ba": ("ssm_beta", "ssm_alpha"),
    "ffn_up": ("ffn_gate", "ffn_up"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
"""A tensor of a layer that holds the rows of several, in this order. Where a layer has `ffn_up` and
no `ffn_gate`, it holds both. q of a compressed query is `attn_q_b`."""


def gguf_spec(name: str) -> ModelSpec:
    """The spec of a GGUF file. Weights stay packed where a kernel supports their type exactly; the
    others are decoded to float32."""
    return spec_of_gguf(read_gguf(name), name)


def spec_of_gguf(file: Gguf, name: str) -> ModelSpec:
    """The spec of a file by its header. Raises BadModel."""
    spec = spec_from_config(gguf_config(file), name=name)
    if architecture_of(file).gain_includes_one:
        spec = replace(spec, norm_plus_one=False)
    if architecture_of(file).family in _TILED:
        spec = _with_tiled_heads(spec)
    kinds: set[str] = set()

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        if _is_absent(spec, path):
            return linear
        tensor = _tensor_of(path, file)
        kinds.add(tensor.kind)
        bias = file.tensors.get(_name_of(path, file, "bias"))
        return replace(linear, format=computed_format(tensor.kind), bias=bias is not None)

    spec = _with_input_table(map_linears(spec, on_linear), file)
    spec = _computed_together(spec)
    bits = [int(linear.format.bits) for linear in linears(spec).values()]
    run = ", ".join(f"{bits.count(n)} linears run as int{n}" for n in (4, 8) if n in bits)
    exactly = " with the file's numbers and int8 activations, " if run else ""
    line = f"GGUF ({', '.join(sorted(kinds))}): {run}{exactly}{bits.count(32)} decoded to float32"
    table = computed_format(file.tensors["token_embd.weight"].kind)
    embed_format = None if table.kind == "dense" else table
    return replace(spec, embed_format=embed_format, rewrites=(*spec.rewrites, line))


_TILED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Delta nets whose value heads llama.cpp's converter reorders, so that keys can be repeated."""


def _with_tiled_heads(spec: ModelSpec) -> ModelSpec:
    layers = []
    same: dict[LayerSpec, LayerSpec] = {}
    for layer in spec.layers:
        new, delta = layer, layer.attention.delta
        if delta is not None:
            attention = replace(layer.attention, delta=replace(delta, tiled=True))
            new = replace(layer, attention=attention)
        layers.append(same.setdefault(new, new))
    return replace(spec, layers=tuple(layers))


def _with_input_table(spec: ModelSpec, file: Gguf) -> ModelSpec:
    """The spec with the format of the table of layer inputs, if the file has a packed one."""
    table = file.tensors.get("per_layer_token_embd.weight")
    if table is None or computed_format(table.kind).kind == "dense":
        return spec
    layers = []
    same: dict[LayerSpec, LayerSpec] = {}
    for layer in spec.layers:
        inputs = layer.layer_input
        if inputs is not None:
            inputs = replace(inputs, table_format=computed_format(table.kind))
        new = replace(layer, layer_input=inputs)
        layers.append(same.setdefault(new, new))
    return replace(spec, layers=tuple(layers))


def _is_absent(spec: ModelSpec, path: str) -> bool:
    """Whether no tensor is computed as it is stored: a layer shares another one's keys and values,
    has keys for values, or its projections are decoded (latent attention, gates of delta nets)."""
    if ".kv_up." in path or ".delta_" in path:  # multiplied as plain numbers
        return True
    _, _, inner = path.partition(".attention.")
    if inner not in ("k", "v"):
        return False
    attention = spec.layers[int(path.split(".")[1])].attention
    return attention.shares_kv or (inner == "v" and attention.v_is_k)


def tensor_name(name: str, layer: int | None, file: Gguf) -> str:
    """The tensor that holds `name` (such as "attn_q.weight"), alone or fused with others."""
    start = "" if layer is None else f"blk.{layer}."
    if start + name in file.tensors:
        return start + name
    module, dot, kind = name.partition(".")
    for whole, inside in FUSED.items():
        if module in inside and f"{start}{whole}{dot}{kind}" in file.tensors:
            return f"{start}{whole}{dot}{kind}"
    return start + name


_FORMATS: Mapping[str, Format] = {
    "Q4_0": blocks(4, 32),
    "Q4_1": blocks(4, 32, mins=True),
    "Q4_K": blocks(4, 32, mins=True, span=256),
    "Q5_0": blocks(8, 32),
    "Q5_1": blocks(8, 32, mins=True),
    "Q5_K": blocks(8, 32, mins=True, span=256),
    "Q8_0": blocks(8, 32),
    "IQ4_NL": blocks(8, 32),
    "IQ4_XS": blocks(8, 32, span=256),
    "Q2_K": blocks(8, 16, mins=True, span=256),
    "Q3_K": blocks(8, 16, span=256),
    "Q6_K": blocks(8, 16, span=256),
}


def computed_format(kind: str) -> Format:
    """The format in which a tensor of this GGUF type is multiplied, or looked up as a table."""
    return _FORMATS.get(kind, dense("float32"))


def _computed_together(spec: ModelSpec) -> ModelSpec:
    """Give q, k, v (and z) one common block format, and gate and up another: each group is computed
    as one product, although files like Q4_K_M store its members in different types."""
    by_path = linears(spec)

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        start, _, key = path.rpartition(".")
        groups = ("q", "k", "v", "z"), ("gate", "up")
        keys = next((keys for keys in groups if key in keys), (key,))
        paths = [f"{start}.{key}" if start else key for key in keys]
        formats = {by_path[path].format for path in paths if path in by_path}
        if len(formats) == 1 or any(format.kind == "dense" for format in formats):
            return linear
        return replace(linear, format=blocks_of_all(formats))

    return map_linears(spec, on_linear)


def _name_of(path: str, file: Gguf, kind: str = "weight") -> str:
    if path == "lm_head":
        return f"output.{kind}"
    _, layer, inner = path.split(".", 2)
    routed = inner in _OF_EXPERTS and ROUTER.format(layer) in file.tensors
    own = architecture_of(file).tensors.get(inner.rpartition(".")[2])
    if inner == "attention.o" and f"blk.{layer}.ssm_out.weight" in file.tensors:
        own = "ssm_out"
    name = f"{own or _MODULES[inner]}{EXPERTS if routed else ''}.{kind}"
    return tensor_name(name, int(layer), file)


def _tensor_of(path: str, file: Gguf) -> GgufTensor:
    """The tensor that holds a linear (all of its experts)."""
    name = _name_of(path, file)
    if path == "lm_head" and name not in file.tensors:
        name = "token_embd.weight"
    tensor = file.tensors.get(name)
    if tensor is None:
        raise BadModel("the GGUF file lacks a tensor", value=name)
    return tensor
