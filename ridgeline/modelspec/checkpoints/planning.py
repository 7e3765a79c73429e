"""Loads specs for planning, including families that the engine cannot run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.hub.names import HubModel, parse_remote
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import BUILT_IN, dummy_shape, is_dummy, model_path
from ridgeline.modelspec.cost.serving_formats import SERVING_FORMATS
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.shapes import known_shapes, planning_config, planning_row
from ridgeline.modelspec.families.unsupported import UNSUPPORTED, unsupported_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import rewrite_linears

_ON_HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/")
_FORMAT_OF_METHOD = {"fp8": "float8_e4m3", "fbgemm_fp8": "float8_e4m3", "mxfp4": "mxfp4"}


def load_planning_spec(model: str) -> ModelSpec:
    """The spec of a published shape, a config.json, a model directory or a built-in model.

    Raises BadModel if there is no such model or its config is not understood.
    """
    name = dummy_shape(model) if is_dummy(model) else model
    if planning_row(name):
        return planning_spec(planning_config(name), name)
    if name in BUILT_IN:
        return load_spec(name)
    remote = parse_remote(name)
    if remote is not None:
        shape = repository_shape(remote.repo) if isinstance(remote, HubModel) else None
        return load_spec(name) if shape is None else load_planning_spec(shape)
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return planning_spec(read_json(path), str(path.parent.name or path))
    if not path.exists():
        near = difflib.get_close_matches(name.lower(), known_shapes(), n=5, cutoff=0.4)
        raise BadModel(
            "no model directory, config.json or published shape has this name",
            value=name,
            limit=f"similar: {', '.join(near)}" if near else f"{len(known_shapes())} known shapes",
            fix="name a directory, a config.json, or one of `ridgeline predict --list-models`",
        )
    config = read_json(model_path(name) / "config.json")
    if config.get("model_type") in FAMILIES and "quantization_config" not in config:
        return load_spec(name)
    return planning_spec(config, path.name)


def planning_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Build a spec from the fields of a config.json, in the format of its `quantization_config`.

    `auto_map` is ignored: only sizes are read, and no code of the model runs.
    """
    plain = {k: v for k, v in config.items() if k not in ("auto_map", "quantization_config")}
    if plain.get("model_type") in UNSUPPORTED:
        spec = unsupported_spec(plain, name=name)
    else:
        spec = spec_from_config(plain, name=name)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return spec
    chosen = SERVING_FORMATS[_quantised_format(quantization)]
    experts_only = chosen.experts_only and any(layer.mlp.num_experts for layer in spec.layers)
    pattern = "layers.*.mlp.*" if experts_only else "layers.*"
    return rewrite_linears(spec, pattern, chosen.format, "format of the checkpoint")


def _quantised_format(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    if method in _FORMAT_OF_METHOD:
        return _FORMAT_OF_METHOD[method]
    if method in ("gptq", "awq") and quantization.get("bits", 4) == 4:
        return "int4"
    raise BadModel(
        "planning cannot read this quantization_config",
        value=method,
        limit="fp8, mxfp4, gptq and awq at 4 bits",
        fix="remove quantization_config from config.json and give --quantization",
    )


def repository_shape(repo: str) -> str | None:
    """The published shape of a Hugging Face repository, without a download; None if unknown."""
    return next((shape for shape in known_shapes() if hub_name(shape) == repo), None)


def hub_name(model: str) -> str | None:
    """The Hugging Face repository of a published shape; None where its source is elsewhere."""
    name = dummy_shape(model) if is_dummy(model) else model
    source = _ON_HUB.match(str(planning_row(name).get("source", "")))
    return None if source is None else source[1]
