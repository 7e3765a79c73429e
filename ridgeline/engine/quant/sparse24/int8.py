"""2:4 sparse linears in INT8 (W8A8), for CPUs: what is stored is 5 bits a weight.

What. Of four adjacent inputs of an output at most two weights are not zero (`ridgeline prune
--sparsity 2:4`). Weights and activations are rounded as by INT8; of the weights the kernel reads
the two, and a bit for each place (native/linear/sparse24.h). `vpexpandb` (AVX-512 VBMI2) puts them
where INT8 has them, in a register, and the byte product is INT8's.

Invariant. The bits of the dense INT8 product of the same weights, for any number of rows.

When it loses. With many rows weights are expanded to INT8 first, which reads less and works more.
Against INT4, which reads 4.1 bits a weight and costs far less quality than pruning to 2:4. CPUs
without VBMI2 would expand byte by byte, slower than INT8: they are refused.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed, in_panels, isa, pack_lines
from ridgeline.engine.quant.int8.quantise import quantise
from ridgeline.engine.quant.packed import PackedLinear, needs_cpu
from ridgeline.errors import CannotRun
from ridgeline.hardware.system import cpu_flags
from ridgeline.modelspec.model import LinearSpec

VARIANTS = ("avx512vnni", "avx512pairs", "avx512amx")
"""Variants of the native kernels that expand lines in registers."""


def why_not_int8(device: torch.device) -> str:
    """Why 2:4 weights in INT8 gain nothing on a device; "" if they do."""
    if device.type != "cpu":
        return f"its kernel runs on the CPU only, not on {device.type}"
    import ridgeline._native as _native

    variant = _native.linear_isa(isa())
    if variant not in VARIANTS:
        return f"the kernels of {variant} do not expand weights in registers"
    if "avx512_vbmi2" not in cpu_flags():
        return "this CPU has no vpexpandb (AVX-512 VBMI2)"
    return ""


def pack_sparse24(q_OI: Tensor, scale_O: Tensor) -> Packed:
    """Pack q_OI, int8 in [-127, 127] of which at most two in four are not zero."""
    num_out, num_in = q_OI.shape
    factors = in_panels(scale_O.to(torch.float32))
    lines = pack_lines("int8_sparse24", q_OI, 0)
    return Packed("int8_sparse24", num_out, num_in, 0, lines, factors=factors)


class Int8Sparse24Linear:
    """Builds y_TO = W x_TI (+ bias_O) of a 2:4 sparse weight in INT8."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> PackedLinear:
        """Raises CannotRun on other devices and CPUs, and for a weight that is not sparse so."""
        needs_cpu(spec, device)
        _check(spec, device)
        q_OI, scale_O = quantise(weight_ON, "full")
        try:
            packed = pack_sparse24(q_OI, scale_O)
        except ValueError as error:
            raise CannotRun(
                "--quantization sparse-24-int8 stores weights that are 2:4 sparse already",
                value=str(error),
                fix="prune the model first: ridgeline prune MODEL --sparsity 2:4",
            ) from None
        return PackedLinear(packed, bias_O, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine. Raises CannotRun."""
        _check(spec, device)
        return "native, two of four weights and their places: 5 bits each, the results of int8"


def _check(spec: LinearSpec, device: torch.device) -> None:
    if reason := why_not_int8(device):
        raise CannotRun(
            f"2:4 weights in INT8 are not faster than INT8 here: {reason}",
            value=spec.format.kind,
            fix="use --quantization int8, which gives the same results",
        )
