"""Linears by Ridgeline's own CPU kernels: packed weights of 4 to 32 bits, on every ISA.

native/linear/linear.h defines the layouts and the reduction order. A `Packed` weight is a few flat
tensors in large pages; a `NativeLinear` multiplies with it. Rows are quantised on the way in, or
beforehand by `quantise_rows`, once for all linears that read them.

Invariant: a row's result is bitwise the same in any batch, at any place in it, on any number of
threads and on every ISA variant (bfloat16 weights on avx512amx excepted, whose tiles add in another
order).

When it loses: models so small that a call costs more than its product.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels import large_pages

ISA_VARIABLE = "RIDGELINE_NATIVE_ISA"
"""Forces a variant: auto, portable, avx2, avxvnni, avx512, avx512vnni, avx512pairs,
avx512amx."""
PANEL, BLOCK = 16, 32

Kind = Literal["int4", "int8", "int8_groups", "int8_sparse24", "bf16", "fp32"]
_PACKED_FROM: Mapping[Kind, torch.dtype] = MappingProxyType(
    {
        "int4": torch.uint8,
        "int8": torch.int8,
        "int8_groups": torch.int8,
        "int8_sparse24": torch.int8,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }
)


def isa() -> str:
    """The variant named by the environment, or "auto"."""
    return os.environ.get(ISA_VARIABLE, "auto")


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [num_out, num_in] in the kernels' layout (native/linear/linear.h).

    Kinds with groups have `scales` (fp16) and optional `mins` (fp16) [panels, spans, 16] and, for
    int4, `zeros` (uint8; None: 8 everywhere, or 0 with minima) [panels, groups, 16]. A span is one
    group; or, where `span` inputs share a scale, each group's scale is that scale times its step
    (`steps`, for minima `min_steps`: int8 [panels, groups, 16]). `factors` are per output, padded
    to whole panels; `group` is the number of inputs that share an activation scale.
    """

    kind: Kind
    num_out: int
    num_in: int
    group: int
    lines: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None
    mins: Tensor | None = None
    steps: Tensor | None = None
    min_steps: Tensor | None = None
    span: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for name in TENSORS if (tensor := getattr(self, name)) is not None)


TENSORS = ("lines", "scales", "zeros", "factors", "mins", "steps", "min_steps")
"""The tensor fields of `Packed`."""


def row_group(kind: Kind, num_in: int, group: int) -> int:
    """How many inputs of a row share one activation scale: the weight's group, or all of them."""
    return group if kind in ("int4", "int8_groups") else -(-num_in // BLOCK) * BLOCK


def packed_bytes(kind: Kind, num_out: int, num_in: int, group: int) -> int:
    """Bytes of packed lines, padding included."""
    return _native.packed_bytes(kind, num_out, num_in, group)


def empty_lines(kind: Kind, num_out: int, num_in: int, group: int) -> Tensor:
    """Allocate memory for packed lines, in large pages where the system has them."""
    return large_pages.empty((packed_bytes(kind, num_out, num_in, group),), torch.uint8)


def pack_lines(kind: Kind, q_OI: Tensor, group: int) -> Tensor:
    """Pack integers (int4: uint8 in 0..15, else int8) or bfloat16 or float32 weights into lines."""
    assert q_OI.dtype == _PACKED_FROM[kind], (kind, q_OI.dtype)
    q_OI = q_OI.contiguous()
    num_out, num_in = q_OI.shape
    lines = empty_lines(kind, num_out, num_in, group)
    address = lines.data_ptr()
    _native.pack_lines(kind, q_OI.data_ptr(), num_out, num_in, group, address, lines.nbytes)
    return lines


def in_panels(values_OG: Tensor) -> Tensor:
    """Reorder per-output values [O, G] to [panels, G, 16], or pad [O] to [panels·16]."""
    missing = -len(values_OG) % PANEL
    if values_OG.dim() == 1:
        return large_pages.moved(torch.nn.functional.pad(values_OG, (0, missing)))
    padded = torch.nn.functional.pad(values_OG, (0, 0, 0, missing)).contiguous()
    return large_pages.moved(padded.view(-1, PANEL, values_OG.shape[1]).transpose(1, 2))


def concatenate_outputs(pieces: Sequence[Packed]) -> Packed:
    """Concatenate weights along their outputs; all but the last must have whole panels."""
    first = pieces[0]
    assert all(piece.num_out % PANEL == 0 for piece in pieces[:-1])

    def concatenate(name: str) -> Tensor | None:
        parts = [part for piece in pieces if (part := getattr(piece, name)) is not None]
        return torch.cat(parts) if parts else None

    return replace(
        first,
        num_out=sum(piece.num_out for piece in pieces),
        lines=torch.cat([piece.lines for piece in pieces]),
        scales=concatenate("scales"),
        zeros=concatenate("zeros"),
        factors=concatenate("factors"),
        mins=concatenate("mins"),
        steps=concatenate("steps"),
        min_steps=concatenate("min_steps"),
    )


def _address(tensor: Tensor | None, dtype: torch.dtype) -> int:
    if tensor is None:
        return 0
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


class NativeLinear:
    """y_TO = x_TI @ W.T (+ bias_O), float32 in and out."""

    __slots__ = ("_isa", "_weight", "bias_O", "group", "packed")

    def __init__(self, packed: Packed, bias_O: Tensor | None = None) -> None:
        self.packed = packed
        self.bias_O = None if bias_O is None else bias_O.to(torch.float32).contiguous()
        self.group = row_group(packed.kind, packed.num_in, packed.group)
        zeros, scales, factors = packed.zeros, packed.scales, packed.factors
        shapes = {scales.shape} if scales is not None else set()
        assert packed.mins is None or packed.mins.shape in shapes
        per_group = [t for t in (zeros, packed.steps, packed.min_steps) if t is not None]
        panels, num_groups = -(-packed.num_out // PANEL), -(-packed.num_in // self.group)
        assert all(t.shape == (panels, num_groups, PANEL) for t in per_group)
        self._weight = _native.LinearWeight(
            packed.kind,
            packed.num_out,
            packed.num_in,
            packed.group,
            _address(packed.lines, torch.uint8),
            packed.lines.nbytes,
            _address(scales, torch.float16),
            0 if scales is None else scales.numel(),
            _address(zeros, torch.uint8),
            _address(factors, torch.float32),
            0 if factors is None else factors.numel(),
            _address(self.bias_O, torch.float32),
            0 if self.bias_O is None else self.bias_O.numel(),
            _address(packed.mins, torch.float16),
            _address(packed.steps, torch.int8),
            _address(packed.min_steps, torch.int8),
            packed.span,
        )
        self._isa = isa()

    @classmethod
    def from_floats(cls, weight_OI: Tensor) -> NativeLinear:
        """Pack a float32 weight."""
        num_out, num_in = weight_OI.shape
        return cls(Packed("fp32", num_out, num_in, 0, pack_lines("fp32", weight_OI, 0)))

    def __call__(self, x_TI: Tensor, row_scale: float = 0.0) -> Tensor:
        """Return y_TO. `row_scale` fixes the scale of activations (0: one per row and group)."""
        out_TO = torch.empty((len(x_TI), self.packed.num_out), dtype=torch.float32)
        self.write(out_TO.data_ptr(), x_TI, torch.get_num_threads(), row_scale)
        return out_TO

    def write(self, out: int, x_TI: Tensor, num_threads: int, row_scale: float = 0.0) -> None:
        """Write contiguous y_TO to the address `out`."""
        assert x_TI.dtype == torch.float32 and x_TI.shape[-1] == self.packed.num_in
        if x_TI.stride(-1) != 1:
            x_TI = x_TI.contiguous()
        self.multiply_rows(x_TI.data_ptr(), x_TI.stride(0), len(x_TI), out, num_threads, row_scale)

    def multiply_rows(
        self, x: int, stride: int, num_rows: int, out: int, num_threads: int, row_scale: float = 0.0
    ) -> None:
        """Multiply rows at the address `x`, `stride` floats apart; write y_TO to `out`."""
        width = self.packed.num_out
        _native.linear(
            self._weight, x, stride, num_rows, out, width, row_scale, num_threads, self._isa
        )

    def multiply_quantised(self, rows: _native.QuantRows) -> Tensor:
        """Return y_TO of rows quantised with this linear's `group`, in one digit."""
        out_TO = torch.empty((rows.num_rows, self.packed.num_out), dtype=torch.float32)
        _native.linear_quantised(
            self._weight,
            rows,
            out_TO.data_ptr(),
            self.packed.num_out,
            torch.get_num_threads(),
            self._isa,
        )
        return out_TO

    def rows(self, ids_T: Tensor) -> Tensor:
        """The weight's rows `ids_T` as floats [T, num_in]: an embedding lookup."""
        ids_T = ids_T.to(torch.int64).contiguous()
        out_TI = torch.empty((len(ids_T), self.packed.num_in), dtype=torch.float32)
        _native.unpack_rows(self._weight, ids_T.data_ptr(), len(ids_T), out_TI.data_ptr())
        return out_TI

    @property
    def digits(self) -> int:
        """As how many rows of 8 bits each row of activations is multiplied: 1, or, with quantised
        weights, up to 3 (native/linear/linear.h, DIGITS)."""
        return self._weight.digits

    @digits.setter
    def digits(self, digits: int) -> None:
        self._weight.digits = digits

    @property
    def address(self) -> int:
        """Address of the kernels' record of this weight, valid while this object lives."""
        return int(self._weight.address)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)


def quantise_rows(x_TI: Tensor, kind: Kind, group: int, num_threads: int = 1) -> _native.QuantRows:
    """Quantise rows for weights of a kind: int8, a scale per row and group of inputs, |value| at
    most 127 (for int4: 120)."""
    assert x_TI.dtype == torch.float32
    x_TI = x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous()
    num_rows, num_in = x_TI.shape
    stride = x_TI.stride(0)
    return _native.quantise_rows(
        kind, x_TI.data_ptr(), stride, num_rows, num_in, group, 0.0, num_threads, isa()
    )
