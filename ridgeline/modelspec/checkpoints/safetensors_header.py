"""What the headers of safetensors files tell about a model, without loading its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.errors import DECODE_ERRORS
from ridgeline.modelspec.checkpoints.json_files import MAX_JSON_BYTES

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 1 << 22


def dtype_of_weights(path: Path) -> str | None:
    """The dtype of the first floating-point tensor, read from the safetensors headers."""
    for file in sorted(path.glob("*.safetensors")):
        for entry in read_header(file).values():
            dtype = entry.get("dtype") if isinstance(entry, dict) else None
            if isinstance(dtype, str) and dtype in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[dtype]
    return None


def dtypes_of(path: Path) -> dict[str, str]:
    """The dtype of every tensor in a directory, read from the safetensors headers."""
    return {
        name: str(entry.get("dtype"))
        for file in sorted(path.glob("*.safetensors"))
        for name, entry in read_header(file).items()
        if isinstance(entry, dict) and name != "__metadata__"
    }


def read_header(file: Path) -> dict[str, Any]:
    """Header of a safetensors file: 8 bytes of little-endian length, then JSON. {} if malformed:
    the weight loader reports the damage in detail."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= MAX_JSON_BYTES:
            return {}
        try:
            header = json.loads(stream.read(length))
        except DECODE_ERRORS:
            return {}
    return header if isinstance(header, dict) else {}


class _Stored(NamedTuple):
    """A tensor's shape, dtype and bytes: where they begin in the file, and how many they are."""

    file: Path
    shape: list[int]
    dtype: str
    start: int
    size: int


def has_own_head(path: Path) -> bool:
    """Whether a directory holds an LM head with other numbers than its embeddings.

    Some fine-tunes train the head of a model whose config still ties it to the embeddings. Only a
    directory that stores both is read, up to the first difference.
    """
    head = _find_stored(path, _HEAD)
    embeddings = None if head is None else _find_stored(path, _EMBEDDINGS)
    if head is None or embeddings is None:
        return False
    alike = head.shape == embeddings.shape and head.dtype == embeddings.dtype
    return not (alike and _same_bytes(head, embeddings))


def _find_stored(path: Path, suffix: str) -> _Stored | None:
    """The first tensor with this end of its name; None also where its entry is malformed, which
    the weight loader reports."""
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in read_header(file).items():
            if name.endswith(suffix):
                return _stored(file, entry)
    return None


def _stored(file: Path, entry: Any) -> _Stored | None:
    try:
        shape, dtype, (begin, end) = entry["shape"], entry["dtype"], entry["data_offsets"]
        with file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little") + begin
        sane = 0 <= begin <= end and start + (end - begin) <= file.stat().st_size
    except (KeyError, TypeError, ValueError):
        return None
    return _Stored(file, shape, dtype, start, end - begin) if sane else None


def _same_bytes(one: _Stored, other: _Stored) -> bool:
    if one.size != other.size:
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for at in range(0, one.size, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, one.size - at)
            if left.read(count) != right.read(count):
                return False
    return True
