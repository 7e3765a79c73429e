"""What the headers of safetensors files tell about a model, without loading its weights."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from ridgeline.modelspec.checkpoints.json_files import MAX_JSON_BYTES

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 1 << 22


def dtype_of_weights(path: Path) -> str | None:
    """The dtype of the first floating-point tensor, read from the safetensors headers."""
    for file in sorted(path.glob("*.safetensors")):
        for entry in read_header(file).values():
            dtype = entry.get("dtype") if isinstance(entry, dict) else None
            if dtype in _SAFETENSORS_DTYPES:
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
        except ValueError:
            return {}
    return header if isinstance(header, dict) else {}


def has_own_head(path: Path) -> bool:
    """Whether a directory holds an LM head with other numbers than its embeddings.

    Some fine-tunes train the head of a model whose config still ties it to the embeddings. Only a
    directory that stores both is read, up to the first difference.
    """
    head, embeddings = _stored(path, _HEAD), _stored(path, _EMBEDDINGS)
    if head is None or embeddings is None:
        return False
    alike = all(head[1][key] == embeddings[1][key] for key in ("shape", "dtype"))
    return not (alike and _same_bytes(head, embeddings))


_Stored = tuple[Path, dict[str, Any]]


def _stored(path: Path, suffix: str) -> _Stored | None:
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in read_header(file).items():
            whole = isinstance(entry, dict) and {"shape", "dtype", "data_offsets"} <= set(entry)
            if name.endswith(suffix) and whole:
                return file, entry
    return None


def _same_bytes(one: _Stored, other: _Stored) -> bool:
    with one[0].open("rb") as a, other[0].open("rb") as b:
        starts = [_data_start(file, entry) for file, (_, entry) in ((a, one), (b, other))]
        size = one[1]["data_offsets"][1] - one[1]["data_offsets"][0]
        with (
            mmap.mmap(a.fileno(), 0, access=mmap.ACCESS_READ) as left,
            mmap.mmap(b.fileno(), 0, access=mmap.ACCESS_READ) as right,
        ):
            for at in range(0, size, _CHUNK_BYTES):
                end = min(at + _CHUNK_BYTES, size)
                if (
                    left[starts[0] + at : starts[0] + end]
                    != right[starts[1] + at : starts[1] + end]
                ):
                    return False
    return True


def _data_start(file: Any, entry: dict[str, Any]) -> int:
    length = int.from_bytes(file.read(8), "little")
    return 8 + length + int(entry["data_offsets"][0])
