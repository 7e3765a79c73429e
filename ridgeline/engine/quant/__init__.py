"""Registry of linear kinds: `Format.kind` -> "module:Class". Nothing is imported until chosen.

A new kind needs one file here, one line in `KINDS`, and a rewrite in `ridgeline.modelspec`.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from ridgeline.errors import CannotRun

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ridgeline.engine.quant.base import Linear, LinearKind
    from ridgeline.modelspec.model import LinearSpec

KINDS = MappingProxyType(
    {
        "dense": "ridgeline.engine.quant.dense:DenseLinear",
        "int8": "ridgeline.engine.quant.int8:Int8Linear",
        "int4": "ridgeline.engine.quant.int4:Int4Linear",
        "blocks": "ridgeline.engine.quant.blocks:BlocksLinear",
        "float8_e4m3": "ridgeline.engine.quant.fp8:Fp8Linear",
        "nvfp4": "ridgeline.engine.quant.nvfp4:Nvfp4Linear",
        "sparse24": "ridgeline.engine.quant.sparse24:Sparse24Linear",
        "int8_sparse24": "ridgeline.engine.quant.sparse24:Int8Sparse24Linear",
        "bf16": "ridgeline.engine.quant.bf16:Bf16Linear",
        "fp32": "ridgeline.engine.quant.fp32:Fp32Linear",
    }
)


def linear_kind(name: str) -> type[LinearKind]:
    """The class that computes format `name`. Raises CannotRun naming the known ones."""
    if name not in KINDS:
        raise CannotRun("unknown kind of linear", value=name, limit=", ".join(KINDS))
    module, _, cls = KINDS[name].partition(":")
    kind: type[LinearKind] = getattr(import_module(module), cls)
    return kind


def build_linear(
    spec: LinearSpec,
    weight_ON: Tensor,
    bias_O: Tensor | None,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> Linear:
    """The linear named by `spec.format.kind`, from a dense weight [num_out, num_in] and bias.

    Raises CannotRun if the kind is unknown or cannot run on this device.
    """
    assert tuple(weight_ON.shape) == (spec.num_out, spec.num_in), (weight_ON.shape, spec)
    assert (bias_O is not None) == spec.bias, spec
    return linear_kind(spec.format.kind).build(spec, weight_ON, bias_O, device, compute_dtype)
