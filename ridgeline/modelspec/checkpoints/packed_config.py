"""The `quantization_config` that Ridgeline writes: the storage format of each packed weight.

    {"quant_method": "ridgeline", "version": 1, "formats": {"lm_head": {"kind": "bf16", …}, …}}

`formats` maps "embed" and paths as in `ridgeline.modelspec.rewrite` (exact paths, not globs) to the
fields of a `Format`. Configs of other methods are handled by
`ridgeline.modelspec.checkpoints.quantised`.
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
    """Formats by path from the config.json of a packed model; None if the model is not packed.

    Raises BadModel if the config has another version or is malformed.
    """
    packed = config.get(KEY)
    if not isinstance(packed, dict) or packed.get("quant_method") != METHOD:
        return None
    if packed.get("version") != VERSION:
        raise BadModel(
            f"{where}: packed by another version of Ridgeline",
            value=packed.get("version"),
            limit=VERSION,
            fix="pack the original checkpoint again with ridgeline quantize",
        )
    try:
        return msgspec.convert(packed.get("formats"), dict[str, Format])
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
    """`spec` with the formats of its packed checkpoint. Raises BadModel for an unknown path."""
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
