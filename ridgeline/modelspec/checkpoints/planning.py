"""Loads specs for planning, including families that the engine cannot run."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.hub.download import config_folder
from ridgeline.hub.names import HubModel, parse_remote
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf, read_gguf
from ridgeline.modelspec.checkpoints.gguf_spec import gguf_spec
from ridgeline.modelspec.checkpoints.json_files import file_errors, read_json
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import (
    BUILT_IN,
    dummy_shape,
    is_dummy,
    local_path,
    model_path,
)
from ridgeline.modelspec.checkpoints.packed_config import KEY, packed_formats
from ridgeline.modelspec.checkpoints.quantization_config import (
    NV_GROUP,
    quantization_config_of,
    read_quantization_config,
    with_outer_quantization,
)
from ridgeline.modelspec.cost.serving_formats import quantised_as, serving_format
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.shapes import (
    hub_repository,
    known_shapes,
    planning_config,
    planning_row,
    shape_of_tuned,
)
from ridgeline.modelspec.families.unsupported import (
    UNSUPPORTED,
    planned_as,
    unsupported_spec,
    with_indexer,
)
from ridgeline.modelspec.format import INT4, dense
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import map_linears, rewrite_linears

_NARROWEST_FLOAT = 16  # bits; narrower GGUF tensors are quantised
_PER_TENSOR_FP8 = "fbgemm_fp8"  # of which only the size is read


@file_errors()
def load_planning_spec(model: str) -> ModelSpec:
    """The spec of a published shape, a config.json, a model directory, a GGUF file or a built-in
    model, in the format of its weights.

    Of a repository of the Hugging Face Hub that is not downloaded, only its config.json is. Raises
    BadModel if there is no such model or its config is not understood, DownloadFailed if the hub
    cannot be reached.
    """
    name = dummy_shape(model) if is_dummy(model) else model
    if planning_row(name):
        return planning_spec(planning_config(name), name)
    if name in BUILT_IN:
        return load_spec(name)
    remote = parse_remote(name)
    if isinstance(remote, HubModel):
        shape = repository_shape(remote.repo)
        if shape is not None:
            return load_planning_spec(shape)
    is_local = remote is None and local_path(name).exists()
    named = None if is_local else named_spec(name)
    if named is not None:
        return named
    folder = config_folder(name)
    if folder is not None:
        return config_planning_spec(folder, str(remote))
    if is_gguf(name):
        return _gguf_planning_spec(name)
    path = local_path(name)
    if path.suffix == ".json" and path.is_file():
        return planning_spec(read_json(path), str(path.parent.name or path))
    if not path.exists():
        near = difflib.get_close_matches(name.lower(), known_shapes(), n=5, cutoff=0.6)
        raise BadModel(
            "no model directory, config.json or published shape has this name",
            value=name,
            limit=f"similar: {', '.join(near)}" if near else f"{len(known_shapes())} known shapes",
            fix="name a directory, a config.json, or one of `ridgeline predict --list-models`",
        )
    config = with_outer_quantization(read_json(model_path(name) / "config.json"))
    quantization = quantization_config_of(path, config)
    is_packed = packed_formats(config, name) is not None
    if config.get("model_type") in FAMILIES and (is_packed or quantization is None):
        return _in_serving_formats(load_spec(name))
    return planning_spec({**config, KEY: quantization}, path.name)


def is_only_planned(model: str) -> bool:
    """Whether it is a config.json, or a directory of which no more can be read: of a family that
    the engine does not run, or of a quantised model without its weights.

    Raises BadModel for a malformed file.
    """
    path = local_path(model)
    file = path / "config.json"
    if path.suffix == ".json" and path.is_file():
        return True
    if not file.is_file():
        return False
    config = with_outer_quantization(read_json(file))
    if config.get(KEY) and not any(path.glob("*.safetensors")):
        return True
    known, reason = planned_as(config)
    return bool(reason) or str(known.get("model_type")) in UNSUPPORTED


_FORMATS = re.compile(r"[-_.](nvfp4|fp4|mxfp4|fp8)(?=$|[-_.])")
_PER_TENSOR_OWNERS = ("nvidia", "redhatai", "neuralmagic")


def named_spec(model: str) -> ModelSpec | None:
    """The spec of a published shape under the name of one of its repositories, which may say a
    format: `nvidia/DeepSeek-R1-0528-FP4`. None if no shape is known by it.

    FP8 has a scale per matrix in the repositories of some owners, and per block of 128 x 128 else.
    """
    shape = shape_of_tuned(model)
    if shape is None:
        return None
    spec = replace(load_planning_spec(shape), name=model.rsplit("/", 1)[-1])
    said = _FORMATS.search(model.rsplit("/", 1)[-1].lower())
    if said is None:
        return spec
    owner = model.rsplit("/", 1)[0].lower()
    fp8 = "float8_e4m3" if owner in _PER_TENSOR_OWNERS else "float8_block"
    chosen = {"fp8": fp8, "mxfp4": "mxfp4"}.get(said[1], "nvfp4")
    if quantised_as(spec) == chosen:
        return spec
    form = serving_format(chosen)
    experts_only = form.experts_only and any(layer.mlp.num_experts for layer in spec.layers)
    plain = map_linears(spec, lambda _, linear: replace(linear, format=dense(spec.stored_dtype)))
    pattern = "layers.*.mlp.*" if experts_only else "layers.*"
    return rewrite_linears(plain, pattern, form.format, "format that the name says")


def config_planning_spec(folder: Path, name: str) -> ModelSpec:
    """The spec of a model of which only config.json is here."""
    config = with_outer_quantization(read_json(folder / "config.json"))
    return planning_spec({**config, KEY: quantization_config_of(folder, config)}, name)


def planning_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Build a spec from the fields of a config.json, in the format of its `quantization_config`.

    `auto_map` is ignored: only sizes are read, and no code of the model runs.
    """
    config = with_outer_quantization(config)
    quantization = config.get("quantization_config")
    known, reason = planned_as(config)
    plain = {k: v for k, v in known.items() if k not in ("auto_map", "quantization_config")}
    if plain.get("model_type") in UNSUPPORTED:
        spec = unsupported_spec(plain, name=name)
    else:
        spec = with_indexer(spec_from_config(plain, name=name), config)
    if reason:
        spec = replace(spec, family=str(config["model_type"]), unsupported=reason)
    if not isinstance(quantization, dict):
        return spec
    chosen = serving_format(_quantised_format(quantization, name))
    experts_only = chosen.experts_only and any(layer.mlp.num_experts for layer in spec.layers)
    pattern = "layers.*.mlp.*" if experts_only else "layers.*"
    return rewrite_linears(spec, pattern, chosen.format, "format of the checkpoint")


def _quantised_format(quantization: Mapping[str, Any], name: str) -> str:
    """The serving format of a `quantization_config`; of several widths, that of "Linear"."""
    if quantization.get("quant_method") == _PER_TENSOR_FP8:
        return "float8_e4m3"
    foreign = read_quantization_config(quantization, name)
    for targets, scope in foreign.scopes:
        if "Linear" in targets:
            foreign = scope
    if foreign.codec in ("mxfp4", "fp4"):
        return "nvfp4" if foreign.group_size == NV_GROUP else "mxfp4"
    if foreign.codec == "bnb4":
        return "nf4"
    if foreign.codec == "scaled" and not foreign.integers:
        if not quantization.get("weight_block_size"):
            return "float8_e4m3"
        return "float8_block" if foreign.block == (128, 128) else f"float8_e4m3-b{foreign.block[1]}"
    if foreign.codec in ("scaled", "bnb8"):
        return "int8"
    skipped = " ".join(map(str, quantization.get("ignore") or ()))
    experts_only = "self_attn" in skipped and "shared_experts" in skipped
    return _integers(foreign.bits, foreign.group_size) + "-experts" * experts_only


def _integers(bits: int, group_size: int | None) -> str:
    """The serving format of weight-only integers."""
    if (bits, group_size) == (INT4.bits, INT4.group_size):
        return "int4"
    return f"int{bits}-row" if group_size is None else f"int{bits}-g{group_size}"


def _in_serving_formats(spec: ModelSpec) -> ModelSpec:
    """A spec in formats of the engine's kernels, in those that planning has names for."""

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        own = linear.format
        if own.kind in ("blocks", "int4"):
            own = serving_format(_integers(int(own.bits), own.group_size)).format
        elif own.kind in ("bf16", "fp32"):
            own = dense("bfloat16" if own.kind == "bf16" else "float32")
        return replace(linear, format=own)

    return map_linears(spec, on_linear)


def _gguf_planning_spec(name: str) -> ModelSpec:
    """A GGUF file's spec with the bits that its layers take per weight on average."""
    spec = replace(gguf_spec(name), stored_dtype="bfloat16")  # of tables and norms
    file = read_gguf(name)
    layers = [
        tensor
        for key, tensor in file.tensors.items()
        if key.startswith("blk.") and len(tensor.shape) > 1
    ]
    num_weights = sum(math.prod(tensor.shape) for tensor in layers)
    bits = 8 * sum(tensor.end - tensor.begin for tensor in layers) / num_weights
    if bits < _NARROWEST_FLOAT:
        chosen = serving_format(f"gguf-{bits:.2f}").format
    else:
        chosen = dense("float32" if bits > _NARROWEST_FLOAT else "bfloat16")
    plain = map_linears(spec, lambda _, linear: replace(linear, format=dense(spec.stored_dtype)))
    return rewrite_linears(plain, "layers.*", chosen, "format of the file")


def repository_shape(repo: str) -> str | None:
    """The published shape of a Hugging Face repository, without a download; None if unknown."""
    return next((shape for shape in known_shapes() if hub_name(shape) == repo), None)


def hub_name(model: str) -> str | None:
    """The Hugging Face repository of a published shape; None where its source is elsewhere."""
    return hub_repository(dummy_shape(model) if is_dummy(model) else model)
