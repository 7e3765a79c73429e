"""The INT4 linear of the registry: rounds a dense weight at load, packs it, multiplies natively."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed, in_panels, pack_lines
from ridgeline.engine.quant.int4.quantise import Int4Weights, quantise
from ridgeline.engine.quant.packed import PackedLinear, needs_cpu
from ridgeline.errors import CannotRun
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import LinearSpec

GROUP_SIZES = (32, 64, 128)


class Int4Linear:
    """Builds `PackedLinear`s of 4 bits."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> PackedLinear:
        needs_cpu(spec, device)
        group_size, zeros = layout_of(spec.format)
        weights = quantise(weight_ON, group_size, zeros=zeros)
        return PackedLinear(pack(weights, group_size), bias_O, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine. Raises CannotRun."""
        needs_cpu(spec, device)
        group_size, zeros = layout_of(spec.format)
        kind = "with zero-points" if zeros else "symmetric"
        return f"native INT4, groups of {group_size}, {kind}"


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
