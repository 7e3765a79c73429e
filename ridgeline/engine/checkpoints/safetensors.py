"""Reads safetensors defensively: every claim of a header is checked before data is used.

  [8 bytes: length N of the header, little-endian][N bytes of JSON][data]

A truncated download, a wrong shard, or an index naming a missing file is a clear error at load time
and never a wrong number later. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.engine.checkpoints.unread_tensors import HARMLESS_TENSORS
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.json_files import file_errors

FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
ALL = FLOATS | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ALL |= {"F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of an element by dtype: those of plain weights, and those of quantised ones too."""
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_AGAIN = "the file is damaged or half downloaded; fetch it again"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@file_errors()
def entries_of(directory: Path, dtypes: Mapping[str, int] = FLOATS) -> dict[str, TensorEntry]:
    """Every tensor of a model directory by name. Raises BadModel for any inconsistency."""
    index = directory / INDEX
    if index.is_file():
        return _sharded(directory, index, dtypes)
    single = directory / SINGLE
    if not single.is_file():
        raise _no_weights(directory)
    return read_header(single, dtypes)


@file_errors()
def read_header(file: Path, dtypes: Mapping[str, int] = FLOATS) -> dict[str, TensorEntry]:
    """The tensors of one file, checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise BadModel(
                f"{file.name}: the header claims more bytes than the file has",
                value=length,
                limit=max(0, size - 8),
                fix=_AGAIN,
            )
        raw = stream.read(length)
    header = parse_header(file, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadModel(f"{file.name}: its __metadata__ is not a map of strings", fix=_AGAIN)
    entries = {name: _entry(file, name, entry, dtypes) for name, entry in header.items()}
    check_extents(file, header, size - 8 - length)
    return entries


def open_tensors(file: Path) -> Any:
    """The file opened for reading, as a context manager.

    Raises BadModel if the library rejects it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise BadModel(f"{file.name}: {error}", fix=_AGAIN) from None


def parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    """The header as an object. Raises BadModel."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadModel(f"{file.name}: the header is not JSON", fix=_AGAIN) from None
    if not isinstance(header, dict):
        raise BadModel(f"{file.name}: the header is not a JSON object", fix=_AGAIN)
    return header


def _entry(file: Path, name: str, entry: Any, dtypes: Mapping[str, int]) -> TensorEntry:
    try:
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        begin, end = entry["data_offsets"]
        sane = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        sane = sane and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise BadModel(f"{file.name}: the entry of tensor {name} is malformed", fix=_AGAIN)
    if dtype not in dtypes:
        raise BadModel(
            f"{file.name}: tensor {name} has a dtype that is not plain floating point",
            value=dtype,
            limit=", ".join(dtypes),
            fix="use the unquantised checkpoint",
        )
    if end - begin != math.prod(shape) * dtypes[dtype]:
        raise BadModel(
            f"{file.name}: tensor {name} of shape {list(shape)} {dtype} does not fill its bytes",
            value=end - begin,
            limit=math.prod(shape) * dtypes[dtype],
            fix=_AGAIN,
        )
    return TensorEntry(file, shape, dtype)


def check_extents(file: Path, header: dict[str, Any], num_bytes: int) -> None:
    """Check that tensors are contiguous and end where the file ends."""
    at = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != at:
            raise BadModel(f"{file.name}: tensors overlap or leave a gap at byte {at}", fix=_AGAIN)
        at = end
    if at != num_bytes:
        raise BadModel(
            f"{file.name}: the file is truncated or has bytes that belong to no tensor",
            value=f"{num_bytes} bytes of data",
            limit=f"{at} by its header",
            fix=_AGAIN,
        )


def _sharded(directory: Path, index: Path, dtypes: Mapping[str, int]) -> dict[str, TensorEntry]:
    weight_map = _weight_map(index)
    missing = sorted(name for name in set(weight_map.values()) if not (directory / name).is_file())
    if missing:
        raise BadModel(
            f"{INDEX} names {len(missing)} file(s) that are not there",
            value=missing[0],
            fix="fetch the missing shards",
        )
    shards = {
        name: read_header(directory / name, dtypes) for name in sorted(set(weight_map.values()))
    }
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise BadModel(f"{INDEX} places tensor {tensor} in a file without it", value=name)
    unlisted = (name for shard in shards.values() for name in shard if name not in weight_map)
    stray = next((t for t in unlisted if not any(mark in t for mark in HARMLESS_TENSORS)), None)
    if stray is not None:
        raise BadModel(f"a shard holds a tensor that {INDEX} does not list", value=stray)
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names_ok = all(
            isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
            for name in weight_map.values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadModel(f"{INDEX} is not a weight index", fix=_AGAIN) from None
    if not names_ok or not weight_map:
        raise BadModel(
            f"{INDEX} must map tensors to .safetensors files in the same directory", fix=_AGAIN
        )
    return weight_map


def _no_weights(directory: Path) -> BadModel:
    names = sorted(child.name for child in directory.iterdir())
    pickled = next((n for n in names if n.endswith(_PICKLED)), None)
    gguf = next((n for n in names if n.endswith(".gguf")), None)
    other = next((n for n in names if n.endswith(".safetensors")), None)
    convert = "load the model with transformers and save_pretrained() it: that writes safetensors"
    if pickled:
        return BadModel(
            "the weights are pickled, and loading a pickle runs code", value=pickled, fix=convert
        )
    if gguf:
        return BadModel("these are GGUF weights", value=gguf, fix="name the .gguf file itself")
    if other:
        return BadModel(
            f"the directory has neither {SINGLE} nor {INDEX}",
            value=other,
            fix=f"rename to {SINGLE}",
        )
    return BadModel("the directory holds no weights", value=str(directory), limit=f"{SINGLE}")
