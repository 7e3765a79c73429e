"""GGUF files: header, metadata and tensor table, each length checked against the file before use.

    "GGUF" · version u32 (2, 3) · tensors u64 · keys u64 · keys, values · tensor table · pad · data

A model may be split into files named `NAME-00001-of-00003.gguf`; the first holds the metadata and
naming any of them opens all. (Format: github.com/ggml-org/ggml, docs/gguf.md.)
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.locate import is_dummy, local_path

_AGAIN = "the file is damaged or half downloaded; fetch it again"
_MAX_COUNT = 100_000_000
_MAX_TENSORS, _MAX_KEYS, _MAX_ITEMS = 1_000_000, 65_536, 8_000_000  # items: of one array
_MAX_DEPTH = 4  # of arrays within arrays
_MAX_ALIGNMENT = 1 << 20
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Type number → type name, weights per block, bytes per block."""


_UNREAD = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8", 41: "Q1_0",
}  # fmt: skip
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufTensor(msgspec.Struct, frozen=True):
    """One tensor: its file, the name of its type, its shape [outputs, inputs], its byte range."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Gguf(msgspec.Struct, frozen=True):
    """The header of a model's file, or of all files of a split model.

    `lists`: tensors whose numbers are known without the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    lists: dict[str, list[float]] = {}


def is_gguf(name: str) -> bool:
    """Whether the model is a GGUF file, by its path or in the cache of downloads."""
    return not is_dummy(name) and local_path(name).suffix == ".gguf"


def read_gguf(name: str) -> Gguf:
    """Read the header of a file, and of the other files of a split model. Raises BadModel."""
    path = local_path(name)
    split = _SPLIT.fullmatch(path.name)
    if split is not None:
        path = path.with_name(_split_name(split[1], 1, int(split[3])))
    if not path.is_file():
        raise BadModel("there is no such GGUF file", value=str(path if split else name))
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    if split is None or int(split[3]) != count:
        raise BadModel(
            "the GGUF file is one of several, and its name does not tell the others",
            value=path.name,
            limit=f"NAME-00001-of-{count:05}.gguf",
            fix="give the files the names under which they were published",
        )
    return _merged(
        first, [path.with_name(_split_name(split[1], i + 1, count)) for i in range(count)]
    )


def _split_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def _merged(first: Gguf, paths: list[Path]) -> Gguf:
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise BadModel(
            f"the GGUF model is split into {len(paths)} files, and {len(missing)} are missing",
            value=missing[0],
            fix="download all of them into one directory",
        )
    tensors = dict(first.tensors)
    for number, path in enumerate(paths[1:], 1):
        part = _read_file(path)
        if part.metadata.get("split.no") != number:
            raise BadModel(
                f"{path.name} says that it is another part of the model",
                value=part.metadata.get("split.no"),
                limit=number,
                fix=_AGAIN,
            )
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise BadModel(
            "the files of the split GGUF model do not belong together",
            value=f"{len(tensors)} tensors",
            limit=f"{expected} by the first file",
            fix=_AGAIN,
        )
    return Gguf(first.path, first.metadata, tensors)


def _read_file(path: Path) -> Gguf:
    about = path.stat()
    return _read_once(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_once(path: Path, size: int, modified: int) -> Gguf:
    """A vocabulary of 260,000 tokens takes seconds to read, and several parts of a load need it."""
    with path.open("rb") as stream:
        if size == 0:
            raise BadModel("the GGUF file is empty", value=str(path))
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data, size).read()


def parse_gguf(header: bytes, size: int, lists: Mapping[str, list[float]]) -> Gguf:
    """The header of a file of `size` bytes that is not written yet; `lists` are the numbers of
    those of its tensors that belong to the metadata. Raises BadModel."""
    found = _Header(Path("model.gguf"), header, size).read()
    return Gguf(found.path, found.metadata, found.tensors, dict(lists))


_KEY_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "general.architecture": str,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.chat_template": str,
    "tokenizer.ggml.tokens": list,
    "tokenizer.ggml.scores": list,
    "tokenizer.ggml.merges": list,
    "tokenizer.ggml.token_type": list,
    "tokenizer.ggml.bos_token_id": int,
    "tokenizer.ggml.eos_token_id": int,
}
_ITEM_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.scores": (int, float),
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.token_type": int,
}


def _check_types(metadata: Mapping[str, Any]) -> None:
    """BadModel where a key that several readers rely on holds a value of another type."""
    for key, kinds in _KEY_TYPES.items():
        value = metadata.get(key)
        if value is not None and not isinstance(value, kinds):
            raise _wrong_type(key, value)
    for key, kinds in _ITEM_TYPES.items():
        items = metadata.get(key, ())
        if wrong := next((item for item in items if not isinstance(item, kinds)), None):
            raise _wrong_type(key, wrong)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise BadModel(
            "the alignment of the GGUF file is not a number of bytes",
            value=alignment,
            limit=f"1..{_MAX_ALIGNMENT}",
            fix=_AGAIN,
        )


def _wrong_type(key: str, value: object) -> BadModel:
    kind = type(value).__name__
    return BadModel(f"the GGUF key {key} holds a value of the type {kind}", value=value, fix=_AGAIN)


class _Header:
    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int) -> None:
        self._path, self._data, self._at, self._size = path, data, 0, size

    def read(self) -> Gguf:
        if self._take(4) != b"GGUF":
            raise BadModel("this is not a GGUF file", value=str(self._path))
        version = self._number("<I")
        if version not in (2, 3):
            raise BadModel("unknown GGUF version", value=version, limit="2, 3")
        num_tensors, num_keys = self._count(_MAX_TENSORS), self._count(_MAX_KEYS)
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        table = [self._entry() for _ in range(num_tensors)]
        _check_types(metadata)
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        placed = {
            name: self._placed(name, shape, kind, start + offset)
            for name, shape, kind, offset in table
        }
        return Gguf(self._path, metadata, placed)

    def _take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise BadModel("the GGUF header exceeds the file", value=str(self._path), fix=_AGAIN)
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _count(self, limit: int = _MAX_COUNT) -> int:
        count = int(self._number("<Q"))
        if count > limit:
            raise BadModel(
                "the GGUF header has an implausible count",
                value=count,
                limit=limit,
                fix=_AGAIN,
            )
        return count

    def _string(self) -> str:
        return self._take(self._count()).decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise BadModel("unknown type of a GGUF metadata value", value=kind, fix=_AGAIN)
        inner, count = self._number("<I"), self._count(_MAX_ITEMS)
        if inner == _STRING:
            return self._strings(count)
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner][1]}"
            return list(struct.unpack(form, self._take(struct.calcsize(form))))
        if depth >= _MAX_DEPTH:
            raise BadModel(
                "a GGUF metadata value has too many arrays within arrays",
                value=f"more than {depth}",
                limit=_MAX_DEPTH,
                fix=_AGAIN,
            )
        # Each inner array has a type and a count, so the file bounds how many can follow.
        if self._at + 12 * count > len(self._data):
            raise BadModel("the GGUF header exceeds the file", value=str(self._path), fix=_AGAIN)
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        data, at, out = self._data, self._at, []
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > len(data):
                raise BadModel(
                    "the GGUF header exceeds the file", value=str(self._path), fix=_AGAIN
                )
            out.append(data[begin:at].decode("utf-8", errors="replace"))
        self._at = at
        return out

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._number("<I")
        if dims > 4:
            raise BadModel(
                "a GGUF tensor has more than 4 dimensions", value=name, limit=4, fix=_AGAIN
            )
        shape = tuple(self._count() for _ in range(dims))[::-1]
        return name, shape, self._number("<I"), int(self._number("<Q"))

    def _placed(self, tensor: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        if kind not in TYPES:
            raise BadModel(
                f"GGUF tensor {tensor} is of a type that is not read",
                value=f"{kind} ({_UNREAD.get(kind, 'unknown')})",
                limit=", ".join(name for name, _, _ in TYPES.values()),
                fix="use a file of another quantisation",
            )
        name, block, nbytes = TYPES[kind]
        if not shape or shape[-1] % block:
            raise BadModel(
                f"GGUF tensor {tensor}: rows of {name} must be multiples of {block}",
                value=list(shape),
                fix=_AGAIN,
            )
        end = begin + prod(shape) // block * nbytes
        if end > self._size:
            raise BadModel("the GGUF file is truncated", value=self._size, limit=end, fix=_AGAIN)
        return GgufTensor(self._path, name, shape, begin, end)


def float_list(file: Gguf, name: str) -> list[float]:
    """The numbers of a small float32 tensor; [] where the file has none. Raises BadModel."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return []
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise BadModel(f"GGUF tensor {name} must be a list of float32", value=tensor.kind)
    if name in file.lists:
        return file.lists[name]
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.begin)
        return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.end - tensor.begin)))
