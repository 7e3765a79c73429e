"""Which weights of a packed model are stored how: the `quantization_config` that Ridgeline writes.

    {"quant_method": "ridgeline", "version": 1, "formats": {"lm_head": {"kind": "bf16", …}, …}}

`formats` maps the paths of `ridgeline.modelspec.rewrite` (exact paths, not globs), and "embed", to the
fields of a `Format`. A config of any other method is left to the reader of configs, which refuses
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears, map_linears

METHOD, VERSION, KEY = "ridgeline", 1, "quantization_config"
PACKED_FILE = "model.ridgeline.safetensors"
EMBED = "embed"


def packed_formats(config: Mapping[str, Any], where: str) -> dict[str, Format] | None:
    """The formats by path that a packed model's config.json names; None where it is not packed."""
    told = config.get(KEY)
    if not isinstance(told, dict) or told.get("quant_method") != METHOD:
        return None
    if told.get("version") != VERSION:
        raise BadModel(
            f"{where}: packed by another version of Ridgeline",
            value=told.get("version"),
            limit=VERSION,
            fix="pack the original checkpoint again with ridgeline quantize",
        )
    try:
        return msgspec.convert(told.get("formats"), dict[str, Format])
    except msgspec.ValidationError as error:
        raise BadModel(f"{where}: {KEY} is malformed: {error}") from None


def packed_config(spec: ModelSpec) -> dict[str, Any]:
    """The `quantization_config` of a spec: the formats of every linear that is not dense."""
    formats = {
        path: msgspec.to_builtins(linear.format)
        for path, linear in linears(spec).items()
        if linear.format.kind != "dense"
    }
    if spec.embed_format is not None:
        formats[EMBED] = msgspec.to_builtins(spec.embed_format)
    return {"quant_method": METHOD, "version": VERSION, "formats": formats}


def with_packed_formats(spec: ModelSpec, formats: Mapping[str, Format], where: str) -> ModelSpec:
    """`spec` with the formats that its checkpoint is packed in."""
    stray = sorted(set(formats) - set(linears(spec)) - {EMBED})
    if stray:
        raise BadModel(f"{where}: {KEY} names a weight that the model lacks", value=stray[0])

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        return replace(linear, format=formats.get(path, linear.format))

    kinds = ", ".join(sorted({format.kind for format in formats.values()}))
    packed = len(set(formats) - {EMBED})
    line = f"{packed} linears -> {kinds}: packed in the checkpoint"
    return replace(
        map_linears(spec, on_linear),
        embed_format=formats.get(EMBED),
        rewrites=(*spec.rewrites, line),
    )
