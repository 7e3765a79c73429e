"""The compute dtype: that of the checkpoint, unless the device could only emulate it.

A CPU without bf16 or fp16 instructions can run such a model, but torch emulates the arithmetic,
which is slower than float32 as soon as a few rows are batched. So `auto` computes in float32 there;
an explicit dtype is used, and its derivation names the cost. Native layers on a CPU always compute
in float32.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from ridgeline.errors import CannotRun

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def native_dtypes(device: torch.device) -> frozenset[str]:
    """Names of the dtypes that `device` has instructions for."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return frozenset({"float32", "float16"} | ({"bfloat16"} if has_bf16 else set()))
    if device.type != "cpu":
        return frozenset({"float32", "float16"})
    return frozenset({"float32"}) | _native_on_cpu()


def _native_on_cpu() -> frozenset[str]:
    if platform.machine() != "x86_64":
        bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    else:  # oneDNN also reports dtypes it emulates with AVX-512, so check the instructions
        bf16 = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
        fp16 = bool(torch.cpu._is_amx_fp16_supported())
    return frozenset(name for name, has in (("bfloat16", bf16), ("float16", fp16)) if has)


def resolve_dtype(
    requested: str,
    stored: str,
    device: torch.device | str,
    *,
    native: frozenset[str] | None = None,
) -> tuple[torch.dtype, str]:
    """The compute dtype and its derivation.

    `requested` is "auto" or a dtype's name, `stored` the dtype of the checkpoint. `native`
    overrides the dtypes that the device has instructions for. Raises CannotRun for an unknown
    dtype.
    """
    device = torch.device(device)
    native = native_dtypes(device) if native is None else native
    name = stored if requested == "auto" else requested
    if name not in DTYPES:
        raise CannotRun("cannot compute in this dtype", value=name, limit=", ".join(DTYPES))
    if name in native:
        return DTYPES[name], "as stored" if requested == "auto" else "as requested"
    lacks = f"this {device.type} has no {name} arithmetic"
    if requested == "auto":
        return torch.float32, f"stored as {stored}, computed in float32: {lacks}"
    return DTYPES[name], f"as requested, but emulated and slower than float32: {lacks}"


def is_exact(values_NM: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` represents every value exactly.

    Compares in pieces, as a table may be large.
    """
    pieces = torch.split(values_NM, 1024)
    return values_NM.dtype == dtype or all(
        torch.equal(piece.to(dtype).to(piece.dtype), piece) for piece in pieces
    )
