"""Which kernel multiplies a layer: the first of the machine's order that is proven exact on it.

The order is by speed, from measurement, and fixed per instruction set, so that the same machine
always computes the same: a choice by stopwatch would change with its neighbours' load. Full-range
weights are tried before pair-safe ones. The memo holds facts about this machine, not state: the
answer is the same for every layer of a shape.

Microseconds of a 2048×2048 layer (and a 256×1408 one), AVX2 without VNNI (Zen 3), one thread, by
rows:

               1            4            16            64           256
    fp32     807  (71)   2174 (149)   3410 (265)   8358 (861)   27379 (2837)
    native   283  (45)    378  (61)   1082 (162)   4108 (592)   18659 (2241)
    fbgemm   430 (180)    631 (197)   1330 (280)   4154 (675)   16680 (2190)
    onednn  1157 (262)   1389 (275)   2040 (350)   4803 (695)   16168 (1937)
    int_mm    ×6           ×6           ×16          over ×20

With VNNI fbgemm and onednn multiply bytes in one instruction and are within 10 % of each other;
with AMX only onednn uses the tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

import torch

from ridgeline.engine.quant.int8.base import GemmKind
from ridgeline.engine.quant.int8.exact import error_of
from ridgeline.engine.quant.int8.quantise import WeightRange
from ridgeline.errors import CannotRun

GEMMS = MappingProxyType(
    {
        "native": "ridgeline.engine.quant.int8.native:NativeGemm",
        "fbgemm": "ridgeline.engine.quant.int8.fbgemm:FbgemmGemm",
        "onednn": "ridgeline.engine.quant.int8.onednn:OnednnGemm",
        "int_mm": "ridgeline.engine.quant.int8.int_mm:IntMmGemm",
        "reference": "ridgeline.engine.quant.int8.reference:ReferenceGemm",
    }
)
_RANGES: tuple[WeightRange, ...] = ("full", "pair_safe")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The kernel, the range its weights must keep to, and what spoke against the ones before it."""

    name: str
    kind: type[GemmKind]
    weight_range: WeightRange
    reason: str


def gemm_kind(name: str) -> type[GemmKind]:
    """The kernel class of that name."""
    module, _, cls = GEMMS[name].partition(":")
    kind: type[GemmKind] = getattr(import_module(module), cls)
    return kind


def order(device: torch.device) -> tuple[str, ...]:
    """Kernels that may be chosen on `device`, the fastest first."""
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        return "onednn", "fbgemm", "native", "int_mm"
    if device.type == "cpu" and torch.cpu._is_vnni_supported():
        return "fbgemm", "onednn", "native", "int_mm"
    return "native", "fbgemm", "onednn", "int_mm"


@functools.cache
def choose(device: torch.device, num_out: int, num_in: int) -> Chosen:
    """The kernel for [num_out, num_in] on `device`.

    Raises CannotRun with every reason where none is exact.
    """
    notes: list[str] = []
    for name in order(device):
        kind = gemm_kind(name)
        for weight_range in _RANGES:
            problem = _problem(kind, weight_range, device, num_out, num_in)
            if problem is None:
                reason = "; ".join([f"{name} with {weight_range} weights", *notes])
                return Chosen(name, kind, weight_range, reason)
            notes.append(f"{name}: {problem}")
    raise CannotRun(
        "no exact INT8 product on this machine",
        value=f"{num_out}x{num_in} on {device}",
        limit="; ".join(dict.fromkeys(notes)),
        fix="leave out --quantization int8",
    )


def _problem(
    kind: type[GemmKind], weight_range: WeightRange, device: torch.device, num_out: int, num_in: int
) -> str | None:
    needs = kind.refusal(device, num_out, num_in)
    return needs or error_of(kind, weight_range, device, num_out, num_in)
