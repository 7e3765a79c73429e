"""A linear over packed weights, in the caller's dtype: shared by INT4, INT8 and bf16 weights.

`group` and `of_quantised` let a fused operator quantise a row once for several linears:
`ridgeline.engine.kernels.native_linear.quantise_rows(x, kind, linear.group)` returns their input.

Shape suffixes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels import large_pages
from ridgeline.engine.kernels.native_linear import PANEL, Kind, NativeLinear, Packed, empty_lines
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import LinearSpec

SPARSE_MASK_BYTES, SPARSE_BLOCK_BYTES = 64, 320
"""Of a block of int8_sparse24: bytes that say what is stored, and all (native/linear/linear.h)."""
_BLOCK = 1_048_573  # random numbers that random weights repeat: prime, so that no row recurs


class PackedLinear:
    """y_TO = W x_TI (+ bias_O) on the CPU, bitwise the same in any batch."""

    __slots__ = ("_dtype", "native")

    def __init__(self, packed: Packed, bias_O: Tensor | None, compute_dtype: torch.dtype) -> None:
        self.native = NativeLinear(packed, bias_O)
        self._dtype = compute_dtype

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.native(x_TI.float()).to(self._dtype)

    def multiply_quantised(self, rows: _native.QuantRows) -> Tensor:
        """The same product of rows that were quantised with this linear's `group`."""
        return self.native.multiply_quantised(rows).to(self._dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and outputs."""
        return self._dtype

    @property
    def group(self) -> int:
        """Inputs that share one activation scale."""
        return self.native.group

    @property
    def nbytes(self) -> int:
        return self.native.nbytes


def take_digits(linear: object, digits: int) -> None:
    """Multiply with activations of that many digits (`Format.digits`); does nothing for one.

    Raises CannotRun if the product is not computed by our own kernels.
    """
    if digits == 1:
        return
    inner = getattr(linear, "inner", linear)
    if not isinstance(inner, PackedLinear):
        raise CannotRun(
            "activations of more than 8 bits are multiplied by the native kernels only",
            value=type(inner).__name__,
            fix="leave out --activations",
        )
    inner.native.digits = digits


def needs_cpu(spec: LinearSpec, device: torch.device) -> None:
    """Raise CannotRun on devices without these kernels."""
    if device.type != "cpu":
        raise CannotRun(
            f"{spec.format.kind} weights are computed on the CPU only",
            value=str(device),
            limit="cpu",
            fix="use --device cpu",
        )


def random_packed(spec: LinearSpec, generator: torch.Generator) -> Packed | None:
    """A random weight in the kernels' layout, generated at memory speed; None if there is no
    layout.

    Values have a standard deviation of about 0.02, like the weights of dummy models.
    """
    format, num_out, num_in = spec.format, spec.num_out, spec.num_in
    if format.kind == "int8_sparse24":
        return _random_sparse24(num_out, num_in, generator)
    if format.kind not in ("int4", "int8", "bf16"):
        return None
    group = format.group_size or 0
    kind: Kind = "int4" if group else "int8" if format.kind == "int8" else "bf16"
    lines = empty_lines(kind, num_out, num_in, group)
    if kind == "bf16":
        normal = torch.randn(_BLOCK, generator=generator) * 0.02
        _repeat(normal.to(torch.bfloat16), lines.view(torch.bfloat16))
        return Packed("bf16", num_out, num_in, 0, lines)
    _repeat(torch.empty(_BLOCK, dtype=torch.uint8).random_(generator=generator), lines)
    panels = -(-num_out // PANEL)
    if kind == "int8":
        lines.clamp_(min=1)  # q = -128 is not among INT8's values
        factors = large_pages.empty((panels * PANEL,), torch.float32)
        factors.fill_(0.02 / 74)  # of -127..127
        return Packed("int8", num_out, num_in, 0, lines, factors=factors)
    table = (panels, -(-num_in // group), PANEL)
    return Packed(
        "int4",
        num_out,
        num_in,
        group,
        lines,
        large_pages.empty(table, torch.float16).fill_(0.02 / 4.6),  # of -8..7
        large_pages.empty(table, torch.uint8).fill_(8) if format.zero_bits else None,
        large_pages.empty((panels * PANEL,), torch.float32).fill_(1.0),
    )


def _random_sparse24(num_out: int, num_in: int, generator: torch.Generator) -> Packed:
    """Two random weights in every four, at random places."""
    lines = empty_lines("int8_sparse24", num_out, num_in, 0)
    _repeat(torch.empty(_BLOCK, dtype=torch.uint8).random_(generator=generator), lines)
    lines.clamp_(min=1)
    pairs = [mask for mask in range(16) if mask.bit_count() == 2]
    masks = torch.tensor([low | high << 4 for low in pairs for high in pairs], dtype=torch.uint8)
    blocks = lines.view(-1, SPARSE_BLOCK_BYTES)
    chosen = torch.empty(len(blocks) * SPARSE_MASK_BYTES, dtype=torch.uint8)
    _repeat(masks[torch.randint(len(masks), (_BLOCK,), generator=generator)], chosen)
    blocks[:, :SPARSE_MASK_BYTES] = chosen.view(len(blocks), -1)
    factors = large_pages.empty((-(-num_out // PANEL) * PANEL,), torch.float32)
    return Packed("int8_sparse24", num_out, num_in, 0, lines, factors=factors.fill_(0.02 / 74))


def _repeat(block: Tensor, into: Tensor) -> None:
    for at in range(0, len(into), len(block)):
        into[at : at + len(block)] = block[: len(into) - at]
