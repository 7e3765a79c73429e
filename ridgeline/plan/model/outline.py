"""A model as sizing sees it: what it stores, computes and caches, in counts; no dtype, no weights.

`Outline` is read from any of: a published shape's name, a config.json, a model directory. Families
that the engine runs come through their ModelSpec, so that both count alike; a few that it does not
run yet (multi-head latent attention, shared experts, KV shared between layers, un-gated layers)
have readers in `ridgeline.plan.model.unsupported_families`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec, read_json
from ridgeline.modelspec.checkpoints.locate import BUILT_IN, dummy_shape, is_dummy, model_path
from ridgeline.modelspec.cost import attention_linears, num_active_params, num_params
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.shapes import shape_config, shape_table
from ridgeline.modelspec.model import LayerSpec, LinearSpec, ModelSpec

_ON_HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/")


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend alike. Per layer: FLOPs per query-key pair and cached numbers per token.

    `decode_flops_per_pair` differs from `flops_per_pair` under latent attention, where a decode
    attends in the latent space. `num_kv_heads`: in how many parts the cache of a token can be
    split over devices (1: latent attention, which every device must hold whole). `num_cached` of
    the layers keep a cache; the others read a neighbour's.
    """

    num_layers: int
    num_cached: int
    num_heads: int
    num_kv_heads: int
    flops_per_pair: int
    decode_flops_per_pair: int
    kv_numbers: int
    kv_rows: int
    window: int | None = None


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose experts are alike: `params` and `rows` (outputs) of ONE expert of one layer."""

    num_layers: int
    num_experts: int
    per_token: int
    params: int
    rows: int


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """See the head of this file. `shared_params` are those of linears that every token uses (the LM
    head, embeddings and experts apart), `shared_rows` their outputs, `small_params` norms and
    biases; `widest` is the largest inner size of a layer.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    stored_dtype: str
    tied_embeddings: bool
    num_params: int
    num_active_params: int
    attention: tuple[Attention, ...]
    experts: tuple[Experts, ...]
    shared_params: int
    shared_rows: int
    small_params: int
    widest: int
    packed: str | None = None

    @property
    def num_kv_heads(self) -> int:
        """In how many parts the KV cache can be split without copies."""
        return min(group.num_kv_heads for group in self.attention)

    @property
    def num_moe_layers(self) -> int:
        return sum(group.num_layers for group in self.experts)

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size


def more_shapes() -> dict[str, dict[str, Any]]:
    """Published shapes for sizing alone: config.json fields, `source` and `params_b`."""
    text = (
        files("ridgeline.modelspec.families")
        .joinpath("planning_shapes.toml")
        .read_text(encoding="utf-8")
    )
    return tomllib.loads(text)


def known_shapes() -> tuple[str, ...]:
    """Every published shape that sizing knows by name."""
    return (*shape_table(), *more_shapes())


def hub_name(model: str) -> str | None:
    """What Hugging Face's hub calls a published shape, as far as its source is there."""
    name = dummy_shape(model) if is_dummy(model) else model
    row = shape_table().get(name) or more_shapes().get(name) or {}
    found = _ON_HUB.match(str(row.get("source", "")))
    return None if found is None else found[1]


def load_outline(model: str) -> Outline:
    """From a published shape's name, a config.json, a model directory or "demo". BadModel else."""
    name = dummy_shape(model) if is_dummy(model) else model
    if name in shape_table():
        return outline_of(spec_from_config(shape_config(name), name=name))
    more = more_shapes()
    if name in more:
        fields = {k: v for k, v in more[name].items() if k not in ("source", "params_b")}
        return read_config({k: None if v == "none" else v for k, v in fields.items()}, name)
    if name in BUILT_IN:
        return outline_of(load_spec(name))
    return _from_disk(name)


def _from_disk(name: str) -> Outline:
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_config(read_json(path), str(path.parent.name or path))
    if not path.exists():
        near = difflib.get_close_matches(name.lower(), known_shapes(), n=5, cutoff=0.4)
        raise BadModel(
            "no model directory, config.json or published shape has this name",
            value=name,
            limit=f"near: {', '.join(near)}" if near else f"{len(known_shapes())} known shapes",
            fix="name a directory, a config.json, or one of `ridgeline predict --list-models`",
        )
    config = read_json(model_path(name) / "config.json")
    if config.get("model_type") in FAMILIES and "quantization_config" not in config:
        return outline_of(load_spec(name))
    return read_config(config, path.name)


def read_config(config: dict[str, Any], name: str) -> Outline:
    """From the fields of a config.json; a checkpoint's quantisation is kept as `packed`."""
    from ridgeline.plan.model.unsupported_families import READERS

    config = dict(config)
    stored = config.pop("quantization_config", None)
    config.pop("auto_map", None)  # nothing of it is run here: only sizes are read
    reader = READERS.get(str(config.get("model_type")))
    if reader is not None:
        found = reader(config, name)
    else:
        spec = spec_from_config(config, name=name)
        found = outline_of(spec)
    return msgspec.structs.replace(found, packed=_packed(stored))


def _packed(stored: object) -> str | None:
    """The weight format that a checkpoint's quantization_config amounts to."""
    if not isinstance(stored, dict):
        return None
    method = stored.get("quant_method")
    known = {"fp8": "float8_e4m3", "fbgemm_fp8": "float8_e4m3", "mxfp4": "mxfp4"}
    if method in known:
        return known[method]
    if method in ("gptq", "awq") and stored.get("bits", 4) == 4:
        return "int4"
    raise BadModel(
        "the checkpoint's quantisation is not understood",
        value=method,
        limit="fp8, mxfp4, gptq and awq at 4 bits",
        fix="remove quantization_config from config.json and give --weight-dtype",
    )


def outline_of(spec: ModelSpec) -> Outline:
    """The counts of a spec, whatever format its weights are in."""
    layers = Counter(spec.layers)
    shared = [li for layer, n in layers.items() for li in _shared_linears(layer) * n]
    weights = sum(li.num_out * li.num_in for li in shared)
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    experts = tuple(_experts(layer, n) for layer, n in layers.items() if layer.mlp.num_experts)
    routed = sum(e.num_layers * e.num_experts * e.params for e in experts)
    kinds = {linear.format.kind for linear in shared} - {"dense"}
    return Outline(
        name=spec.name,
        family=spec.family,
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        stored_dtype=spec.stored_dtype,
        tied_embeddings=spec.tied_embeddings,
        num_params=num_params(spec),
        num_active_params=num_active_params(spec),
        attention=tuple(_attention(layer, n) for layer, n in layers.items()),
        experts=experts,
        shared_params=weights,
        shared_rows=sum(li.num_out for li in shared),
        small_params=num_params(spec) - tables - weights - routed,
        widest=max(layer.mlp.up.num_out * max(1, layer.mlp.experts_per_token) for layer in layers),
        packed=min(kinds) if kinds else None,
    )


def _shared_linears(layer: LayerSpec) -> tuple[LinearSpec, ...]:
    mlp = layer.mlp
    if mlp.num_experts:
        return (*attention_linears(layer.attention), *([mlp.router] if mlp.router else []))
    return (*attention_linears(layer.attention), mlp.gate, mlp.up, mlp.down)


def _experts(layer: LayerSpec, num_layers: int) -> Experts:
    parts = (layer.mlp.gate, layer.mlp.up, layer.mlp.down)
    return Experts(
        num_layers=num_layers,
        num_experts=layer.mlp.num_experts,
        per_token=layer.mlp.experts_per_token,
        params=sum(linear.num_out * linear.num_in for linear in parts),
        rows=sum(linear.num_out for linear in parts),
    )


def _attention(layer: LayerSpec, num_layers: int) -> Attention:
    a = layer.attention
    per_pair = 4 * a.num_heads * a.head_dim
    return Attention(
        num_layers=num_layers,
        num_cached=num_layers,
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        flops_per_pair=per_pair,
        decode_flops_per_pair=per_pair,
        kv_numbers=2 * a.num_kv_heads * a.head_dim,
        kv_rows=2 * a.num_kv_heads,
        window=a.window,
    )
