"""Loads the spec of a model named by a directory, a GGUF file, "demo" or `dummy:NAME`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.gguf_spec import gguf_spec
from ridgeline.modelspec.checkpoints.locate import dummy_shape, is_dummy, model_path
from ridgeline.modelspec.checkpoints.packed_config import KEY, packed_formats, with_packed_formats
from ridgeline.modelspec.checkpoints.quantised import (
    read_quantization_config,
    with_quantised_formats,
)
from ridgeline.modelspec.families.build import eos_in_vocabulary
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.families.shapes import shape_config
from ridgeline.modelspec.model import ModelSpec

_MAX_JSON_BYTES = 50_000_000
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def load_spec(model: str) -> ModelSpec:
    """The spec of a model directory, a GGUF file, "demo", or `dummy:NAME`. Raises BadModel.

    The end-of-sequence tokens are those of config.json and of generation_config.json together.
    If the config names no dtype, the first weight file decides.
    """
    if is_dummy(model):
        return spec_from_config(shape_config(dummy_shape(model)), name=model)
    if is_gguf(model):
        return gguf_spec(model)
    path = model_path(model)
    config = read_json(path / "config.json")
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        config["dtype"] = _dtype_of_weights(path)
    formats = packed_formats(config, model)
    quantization = config.pop(KEY, None)
    spec = spec_from_config(config, name=model)
    spec = msgspec.structs.replace(spec, eos_token_ids=_all_eos(spec, path))
    if formats is not None:
        return with_packed_formats(spec, formats, model)
    if quantization is None:
        return spec
    foreign = read_quantization_config(quantization, model)
    return with_quantised_formats(spec, foreign, _dtypes(path), model)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises BadModel if the file is missing, too large or not an object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise BadModel(
                "the file is too large", value=str(path), limit=f"{_MAX_JSON_BYTES} bytes"
            )
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadModel("cannot read the file", value=str(path), fix=str(error)) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadModel("the file is not valid JSON", value=str(path), fix=str(error)) from None
    if not isinstance(document, dict):
        raise BadModel("the file is not a JSON object", value=str(path))
    return document


def _all_eos(spec: ModelSpec, path: Path) -> tuple[int, ...]:
    # Chat models often list their end-of-turn tokens in generation_config.json only.
    generation = path / "generation_config.json"
    if not generation.is_file():
        return spec.eos_token_ids
    more = read_json(generation).get("eos_token_id")
    ids = more if isinstance(more, list) else [] if more is None else [more]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise BadModel("eos_token_id is not a token id", value=more, limit=str(generation))
    return eos_in_vocabulary((*spec.eos_token_ids, *ids), spec.vocab_size)


def _dtype_of_weights(path: Path) -> str | None:
    """The dtype of the first floating-point tensor, read from the safetensors headers."""
    for file in sorted(path.glob("*.safetensors")):
        for entry in _header(file).values():
            dtype = entry.get("dtype") if isinstance(entry, dict) else None
            if dtype in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[dtype]
    return None


def _dtypes(path: Path) -> dict[str, str]:
    """The dtype of every tensor in a directory, read from the safetensors headers."""
    return {
        name: str(entry.get("dtype"))
        for file in sorted(path.glob("*.safetensors"))
        for name, entry in _header(file).items()
        if isinstance(entry, dict) and name != "__metadata__"
    }


def _header(file: Path) -> dict[str, Any]:
    """Header of a safetensors file: 8 bytes of little-endian length, then JSON. {} if malformed:
    the weight loader reports the damage in detail."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_JSON_BYTES:
            return {}
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return {}
    return header if isinstance(header, dict) else {}
