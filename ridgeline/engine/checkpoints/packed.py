"""Packed weights on disk, in the order in which kernels read them.

One safetensors file, written so that lines start at multiples of 64 bytes (a padding tensor fills
each gap, since the format allows none). Nothing is repacked on opening: packed weights are copied
into large pages, which stream faster than the small pages of a mapped file; the few dense tensors
are mapped.

  layers.3.q+k+v.lines   uint8           layers.3.q+k+v.scales   fp16 [panels, groups, 16]
  layers.3.q+k+v.zeros   uint8, or none  layers.3.q+k+v.factors  float32 [panels · 16]
  layers.3.o.columns     int32           layers.3.o.wide.lines: inputs kept separate (LLM.int8)
  embed.lines, …         a packed table  attention_norm of layer 3: every other tensor, under its
                                         part's name
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from ridgeline.engine.checkpoints.safetensors import check_extents, parse_header
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.kernels import large_pages
from ridgeline.engine.kernels.native_linear import PANEL, Kind, Packed, packed_bytes
from ridgeline.engine.quant.outliers import OutlierPacked
from ridgeline.engine.quant.ready import Ready
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.packed_config import PACKED_FILE
from ridgeline.modelspec.model import LinearSpec

_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_AGAIN = "pack the checkpoint again with ridgeline quantize"


def packed_name(keys: Sequence[str], layer: int | None, expert: int | None) -> str:
    """The name of the product of `keys` in the file."""
    where = "" if layer is None else f"layers.{layer}."
    return where + ("" if expert is None else f"experts.{expert}.") + "+".join(keys)


class PackedWriter:
    """Writes tensors one after another, and finally the header into the space reserved for it."""

    def __init__(self, path: Path, most_tensors: int) -> None:
        self._file: BinaryIO = path.open("wb")
        self._room = -(-(most_tensors + 1) * 256 // _ALIGNMENT) * _ALIGNMENT - 8
        self._file.seek(8 + self._room)
        self._at = 0
        self._header: dict[str, Any] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Append `tensor` at the next multiple of 64 bytes."""
        gap = -self._at % _ALIGNMENT
        if gap:
            self._append(f"pad.{len(self._header)}", torch.zeros(gap, dtype=torch.uint8))
        self._append(name, tensor)

    def _append(self, name: str, tensor: Tensor) -> None:
        assert name not in self._header, name
        tensor = tensor.contiguous()
        end = self._at + tensor.nbytes
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, end],
        }
        self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._at = end

    def close(self) -> None:
        """Write the header, which makes the file valid."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(text) <= self._room, "the names are longer than the room left for them"
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.close()

    def add_ready(self, name: str, ready: Packed | OutlierPacked) -> None:
        """The tensors of a packed weight, and of the inputs kept separate from it."""
        if isinstance(ready, OutlierPacked):
            self.add(f"{name}.columns", ready.columns_W.to(torch.int32))
            self._add_packed(f"{name}.wide", ready.wide)
            ready = ready.packed
        self._add_packed(name, ready)

    def _add_packed(self, name: str, packed: Packed) -> None:
        for field in ("lines", "scales", "zeros", "factors"):
            tensor = getattr(packed, field)
            if tensor is not None:
                self.add(f"{name}.{field}", tensor)


class _FileEntry(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int


class PackedWeights:
    """The tensors of a packed model directory, as a weight source.

    A context manager; tensors stay valid after it exits. Raises BadModel for a malformed file and
    for missing or misshapen tensors.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / PACKED_FILE
        try:
            with self._path.open("rb") as stream:
                # Copy on write: torch requires writable memory, although it is never written.
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise BadModel("cannot map the packed weights", value=str(error), fix=_AGAIN) from None
        self._entries = self._read()

    def __enter__(self) -> PackedWeights:
        return self

    def __exit__(self, *error: object) -> None:
        """The mapping stays alive as long as tensors point into it."""

    def get(self, part: Part) -> Tensor:
        """A dense part that points into the mapping: read or convert it, do not write to it."""
        return self._mapped(str(part), part.shape)

    def packed(
        self, spec: LinearSpec, keys: Sequence[str], layer: int | None, expert: int | None
    ) -> Ready | None:
        """The product of `keys` side by side in `spec`'s format; None if it is dense."""
        kind = spec.format.kind
        if kind == "dense":
            return None
        assert kind in ("int4", "int8", "bf16"), kind
        name = packed_name(keys, layer, expert)
        packed = self._packed(name, spec)
        return self._with_outliers(name, spec, packed) if spec.format.wide else packed

    def _with_outliers(self, name: str, spec: LinearSpec, packed: Packed) -> OutlierPacked:
        count = spec.format.wide
        columns_W = self._mapped(f"{name}.columns", (count,)).long()
        if (
            not bool((columns_W[1:] > columns_W[:-1]).all())
            or not 0 <= int(columns_W[0]) <= int(columns_W[-1]) < spec.num_in
        ):
            raise BadModel(f"{self._path.name}: {name}.columns are no inputs in order", fix=_AGAIN)
        kind: Kind = "bf16" if spec.format.wide_bits == 16 else "fp32"
        lines = self._lines(f"{name}.wide.lines", kind, spec.num_out, count, 0)
        return OutlierPacked(packed, Packed(kind, spec.num_out, count, 0, lines), columns_W)

    def _packed(self, name: str, spec: LinearSpec) -> Packed:
        kind = cast(Kind, spec.format.kind)  # only packed kinds are written
        panels, group = -(-spec.num_out // PANEL), spec.format.group_size or 0
        table = (panels, -(-spec.num_in // group), PANEL) if group else ()
        return Packed(
            kind,
            spec.num_out,
            spec.num_in,
            group,
            self._lines(f"{name}.lines", kind, spec.num_out, spec.num_in, group),
            self._copied(f"{name}.scales", table) if group else None,
            self._copied(f"{name}.zeros", table) if spec.format.zero_bits else None,
            None if kind == "bf16" else self._copied(f"{name}.factors", (panels * PANEL,)),
        )

    def _lines(self, name: str, kind: Kind, num_out: int, num_in: int, group: int) -> Tensor:
        return self._copied(name, (packed_bytes(kind, num_out, num_in, group),))

    def _mapped(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        entry = self._entries.get(name)
        if entry is None:
            raise BadModel(f"{self._path.name}: there is no tensor {name}", fix=_AGAIN)
        if shape is not None and entry.shape != shape:
            raise BadModel(
                f"{self._path.name}: tensor {name} has another shape than the config says",
                value=list(entry.shape),
                limit=list(shape),
                fix=_AGAIN,
            )
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def _copied(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """A copy in large pages, without holding any of it twice: mapped files use small pages."""
        mapped = self._mapped(name, shape)
        copy = large_pages.moved(mapped)
        if hasattr(mmap, "MADV_DONTNEED"):
            begin = self._entries[name].begin // mmap.PAGESIZE * mmap.PAGESIZE
            length = self._entries[name].begin + mapped.nbytes - begin
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)
        return copy

    def _read(self) -> dict[str, _FileEntry]:
        length = int.from_bytes(self._map[:8], "little")
        if len(self._map) < 8 or length > min(_MAX_HEADER_BYTES, len(self._map) - 8):
            raise BadModel(f"{self._path.name}: the header exceeds the file", fix=_AGAIN)
        header = parse_header(self._path, self._map[8 : 8 + length])
        entries = {name: self._entry(name, at, 8 + length) for name, at in header.items()}
        check_extents(self._path, header, len(self._map) - 8 - length)
        return entries

    def _entry(self, name: str, entry: Any, start: int) -> _FileEntry:
        try:
            shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
            begin, end = entry["data_offsets"]
            num_bytes = math.prod(shape) * dtype.itemsize
            whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
            sane = whole and end - begin == num_bytes and (start + begin) % dtype.itemsize == 0
        except (TypeError, KeyError, ValueError):
            sane = False
        if not sane:
            raise BadModel(f"{self._path.name}: the entry of {name} is malformed", fix=_AGAIN)
        return _FileEntry(shape, dtype, start + begin)
