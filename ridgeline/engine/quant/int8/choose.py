"""Chooses the kernel of an INT8 layer: the first in the machine's order that is verified exact.

The order is by measured speed and fixed per instruction set, so the same machine always computes
the same; a choice by timing would depend on other load. Full-range weights are tried before pair-
safe ones. The cache holds facts about this machine: the answer is the same for every layer of a
shape.

Microseconds of an 8192×2048 layer, AVX2 without VNNI (Zen 3), two threads, by rows
(benchmarks/bench_linear.py; one run, medians of 5):

               1      4      8     16     64    512
    native   648    747   1459   2478   8571  70491
    fbgemm   915   1172   1944   2404   7232  63668
    fp32    3941  13517  11829  13632  26825 158804

From 64 rows on fbgemm is 10 to 20 % faster here: its weights are restricted to the pair-safe range,
which lets it add two products in 16 bits; ours keep all 8 bits. With AMX (two threads of a Xeon,
interleaved medians of 5; oneDNN's products of this shape were not exact there):

               1      4      8     16     64    512
    native   640    658    646    672   1119   4564
    fbgemm   791   1031   1194   1424   2752  19658
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
class ChosenGemm:
    """The kernel, the range of its weights, and why the earlier ones were rejected."""

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
    return "native", "fbgemm", "onednn", "int_mm"


@functools.cache
def choose(device: torch.device, num_out: int, num_in: int) -> ChosenGemm:
    """The kernel for [num_out, num_in] on `device`. Raises CannotRun with every reason if none is
    exact.
    """
    notes: list[str] = []
    for name in order(device):
        kind = gemm_kind(name)
        for weight_range in _RANGES:
            problem = _problem(kind, weight_range, device, num_out, num_in)
            if problem is None:
                reason = "; ".join([f"{name} with {weight_range} weights", *notes])
                return ChosenGemm(name, kind, weight_range, reason)
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
