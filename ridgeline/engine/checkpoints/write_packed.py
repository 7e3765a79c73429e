"""Writes a model in the engine's packed form, for `ridgeline quantize`.

Each product of the decoder (q, k and v together; gate and up together) is rounded and packed
exactly as loading with the same formats would, and written part by part, so one layer is in memory
at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.load import fuse, whole_of
from ridgeline.engine.checkpoints.packed import PackedWriter, packed_name
from ridgeline.engine.checkpoints.sources import CheckpointWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.kernels.native_int8 import pack as pack_int8
from ridgeline.engine.kernels.native_linear import Packed, concatenate_outputs
from ridgeline.engine.quant.int4.linear import layout_of
from ridgeline.engine.quant.int4.linear import pack as pack_int4
from ridgeline.engine.quant.int4.quantise import quantise as quantise_int4
from ridgeline.engine.quant.int8.quantise import quantise as quantise_int8
from ridgeline.engine.quant.outliers import OutlierPacked
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.checkpoints.packed_config import KEY, PACKED_FILE, packed_config
from ridgeline.modelspec.cost import shares_table
from ridgeline.modelspec.format import INT8, Format
from ridgeline.modelspec.layer_inputs import refuse_special_layers
from ridgeline.modelspec.model import AttentionSpec, LayerSpec, LinearSpec, ModelSpec

_ROWS = 4096  # of a table, rounded at once: a multiple of a panel
_KEPT = (
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_KEPT_FOLDER = "additional_chat_templates"


class LinearProduct(NamedTuple):
    """Linears of one input that are computed as one."""

    keys: list[str]
    specs: list[LinearSpec]
    layer: int | None = None
    expert: int | None = None


def products(spec: ModelSpec) -> Iterator[LinearProduct]:
    """Every product of the decoder, joined as `load_decoder` joins them."""
    for index, layer in enumerate(spec.layers):
        yield from layer_products(layer, index)
    yield LinearProduct(["lm_head"], [spec.lm_head])


def layer_products(layer: LayerSpec, index: int) -> Iterator[LinearProduct]:
    """Every product of one layer."""
    mlp = layer.mlp
    yield from _attention_products(layer.attention, index)
    if mlp.router is None:
        gate_up = LinearProduct(["gate", "up"], [mlp.gate, mlp.up], index)
        yield gate_up if mlp.gated else LinearProduct(["up"], [mlp.up], index)
        yield LinearProduct(["down"], [mlp.down], index)
        return
    yield LinearProduct(["router"], [mlp.router], index)
    if mlp.shared is not None:
        shared = mlp.shared
        yield LinearProduct(["shared_gate", "shared_up"], [shared.gate, shared.up], index)
        yield LinearProduct(["shared_down"], [shared.down], index)
        if shared.router is not None:
            yield LinearProduct(["shared_router"], [shared.router], index)
    for expert in range(mlp.num_experts):
        yield LinearProduct(["expert_gate", "expert_up"], [mlp.gate, mlp.up], index, expert)
        yield LinearProduct(["expert_down"], [mlp.down], index, expert)


def _attention_products(attention: AttentionSpec, index: int) -> Iterator[LinearProduct]:
    latent, delta = attention.latent, attention.delta
    if delta is not None:  # b and a are small and decide like a router
        keys = ["delta_q", "delta_k", "delta_v", "delta_z"]
        yield LinearProduct(keys, [attention.q, attention.k, attention.v, delta.z], index)
        yield LinearProduct(["delta_o"], [attention.o], index)
        return
    if latent is None:
        num = 1 if attention.shares_kv else 2 if attention.v_is_k else 3
        specs = [attention.q, attention.k, attention.v]
        yield LinearProduct(["q", "k", "v"][:num], specs[:num], index)
    else:
        if latent.q_down is not None:
            yield LinearProduct(["q_down"], [latent.q_down], index)
        yield LinearProduct(["q"], [attention.q], index)
        yield LinearProduct(["kv_down"], [latent.kv_down], index)
    yield LinearProduct(["o"], [attention.o], index)


def pack_model(model: str, spec: ModelSpec, directory: Path) -> int:
    """Write `model`, in the formats of `spec`, to `directory`; returns the bytes of its weights.

    Raises BadInput if the directory is not empty, CannotRun if there is nothing to pack.
    """
    if is_dummy(model):
        raise CannotRun("a dummy model has no weights to pack", value=model)
    refuse_special_layers(spec, "the packed format")
    source = model_path(model)
    if (source / PACKED_FILE).is_file():
        raise CannotRun("the model is packed already", value=model, fix="name the original")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput(
            "the output is there and is not an empty directory",
            value=str(directory),
            fix="name another --output; nothing is overwritten",
        )
    partial = directory.with_name(directory.name + ".partial")
    if (partial / "run.json").exists():
        raise BadInput(
            "a half-made model of another run is in the way",
            value=str(partial),
            fix="run that command again to finish it, or remove it",
        )
    shutil.rmtree(partial, ignore_errors=True)
    with torch.inference_mode(), CheckpointWeights(source, spec) as weights:
        written = write_packed(source, spec, weights, partial, {})
    if directory.exists():
        directory.rmdir()  # it was empty
    partial.rename(directory)
    return written


def write_packed(
    source: Path, spec: ModelSpec, weights: WeightSource, directory: Path, made: dict[str, Any]
) -> int:
    """Write `weights` in the formats of `spec`; returns the bytes. `made` records how they were
    produced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    copy_config(source, directory, spec, packed_config(spec) | made)
    target = directory / PACKED_FILE
    _write_weights(spec, weights, target)
    return target.stat().st_size


def copy_config(
    source: Path,
    directory: Path,
    spec: ModelSpec,
    quantised: Any,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write config.json with `changes` and with `quantised` as its quantization_config (None:
    without one), and copy the tokenizer's files.
    """
    config = {**read_json(source / "config.json"), **changes, KEY: quantised}
    if quantised is None:
        del config[KEY]
    config["tie_word_embeddings"] = spec.tied_embeddings
    if config.get("torch_dtype") is None:
        config.setdefault("dtype", spec.stored_dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in source.iterdir():
        if file.name in _KEPT or file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, directory / file.name)
    if (source / _KEPT_FOLDER).is_dir() and source.resolve() != directory.resolve():
        shutil.copytree(source / _KEPT_FOLDER, directory / _KEPT_FOLDER, dirs_exist_ok=True)


def _write_weights(spec: ModelSpec, weights: WeightSource, target: Path) -> None:
    packed_keys = set[tuple[str, int | None, int | None]]()
    shared = spec.embed_format is not None and shares_table(spec)
    partial = target.with_suffix(".partial")
    writer = PackedWriter(partial, most_tensors=9 * len(list(parts(spec))) + 9)
    if spec.embed_format is not None:
        writer.add_ready("embed", _packed_table(spec, spec.embed_format, weights))
        packed_keys.add(("embed", None, None))
    for product in products(spec):
        if product.specs[0].format.kind == "dense" or (shared and product.keys == ["lm_head"]):
            continue
        writer.add_ready(
            packed_name(product.keys, product.layer, product.expert),
            _packed(spec, product, weights),
        )
        packed_keys |= {(key, product.layer, product.expert) for key in product.keys}
    for part in parts(spec):
        if (part.key, part.layer, part.expert) not in packed_keys:
            writer.add(str(part), weights.get(part))
    writer.close()
    partial.rename(target)  # a file of this name is always whole


def _packed_table(spec: ModelSpec, format: Format, weights: WeightSource) -> Packed:
    """The embedding table, rounded and packed in pieces of the vocabulary."""
    table_VC = weights.get(Part("embed", (spec.vocab_size, spec.hidden_size)))
    return concatenate_outputs(
        [_packed_rows(piece, format) for piece in torch.split(table_VC, _ROWS)]
    )


def _packed_rows(weight_OI: Tensor, format: Format) -> Packed:
    if format.kind == "int8":
        return pack_int8(*quantise_int8(weight_OI, "full"))
    group_size, zeros = layout_of(format)
    return pack_int4(quantise_int4(weight_OI, group_size, zeros=zeros), group_size)


def _packed(
    spec: ModelSpec, product: LinearProduct, weights: WeightSource
) -> Packed | OutlierPacked:
    if len({linear.format for linear in product.specs}) == 1:
        whole = whole_of(product.specs)
        ready = weights.packed(whole, product.keys, product.layer, product.expert)
        if isinstance(ready, Packed | OutlierPacked):
            return ready
    tied = product.keys == ["lm_head"] and spec.tied_embeddings
    keys = ["embed"] if tied else product.keys
    dense = [
        weights.get(Part(key, (linear.num_out, linear.num_in), product.layer, product.expert))
        for key, linear in zip(keys, product.specs, strict=True)
    ]
    if {linear.format for linear in product.specs} == {INT8}:
        # Not by `fuse`: it makes the linear of the fastest kernel here, which may be torch's.
        return _packed_rows(torch.cat(dense), INT8)
    bare = [LinearSpec(num_out=s.num_out, num_in=s.num_in, format=s.format) for s in product.specs]
    linear = fuse(bare, dense, [None] * len(bare), torch.device("cpu"), torch.float32)
    if not isinstance(linear, PackedLinear):
        raise CannotRun(
            "these weights are computed together and must share one packed format",
            value=" + ".join(
                f"{k}: {s.format.kind}" for k, s in zip(product.keys, product.specs, strict=True)
            ),
        )
    return linear.native.packed
