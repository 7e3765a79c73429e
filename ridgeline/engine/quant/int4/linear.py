"""The INT4 linear of the registry: rounds a dense weight at load and packs it for its device."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed, in_panels, pack_lines
from ridgeline.engine.quant.int4.quantise import Int4Weights, quantise
from ridgeline.engine.quant.int4.unpacked import UnpackedInt4
from ridgeline.engine.quant.packed import PackedLinear
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import LinearSpec

GROUP_SIZES = (32, 64, 128)


class Int4Linear:
    """Builds linears of 4 bits: `PackedLinear` on the CPU, `UnpackedInt4` elsewhere."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> PackedLinear | UnpackedInt4:
        group_size, zeros = layout_of(spec.format)
        if device.type != "cpu":
            bias = None if bias_O is None else bias_O.to(device=device, dtype=compute_dtype)
            weights = quantise(weight_ON.to(device), group_size, zeros=zeros)
            return UnpackedInt4(weights, group_size, bias, compute_dtype)
        weights = quantise(weight_ON, group_size, zeros=zeros)
        return PackedLinear(pack(weights, group_size), bias_O, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine. Raises CannotRun."""
        group_size, zeros = layout_of(spec.format)
        kind = "with zero-points" if zeros else "symmetric"
        where = "native INT4" if device.type == "cpu" else "INT4 weights, float activations"
        return f"{where}, groups of {group_size}, {kind}"


def layout_of(format: Format) -> tuple[int, bool]:
    """(group size, has zero-points). Raises CannotRun for layouts unknown to the kernel."""
    if format.bits != 4 or format.group_size not in GROUP_SIZES:
        raise CannotRun(
            "int4 linears have 4 bits and groups of 32, 64 or 128 inputs",
            value=f"{format.bits} bits, group size {format.group_size}",
            limit=", ".join(map(str, GROUP_SIZES)),
        )
    return format.group_size, format.zero_bits > 0


def pack(weights: Int4Weights, group_size: int) -> Packed:
    """In the kernels' layout."""
    num_out, num_in = weights.q_OI.shape
    return Packed(
        "int4",
        num_out,
        num_in,
        group_size,
        pack_lines("int4", weights.q_OI, group_size),
        in_panels(weights.scale_OG),
        None if weights.zero_OG is None else in_panels(weights.zero_OG),
        in_panels(weights.factor_O.float()),
    )
