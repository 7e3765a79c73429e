"""The operators between a layer's products: norms, rotation, gate.

Three sets with the same results up to rounding: torch operators (`TORCH`, the reference), the same
functions compiled by Inductor (`compiled_ops`), and Ridgeline's Triton kernels (`triton_ops`).

Shape legend: T rows, C hidden_size, I intermediate size, X query, key and value heads, D head_dim,
R rotated dimensions.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.scaled_products import Kind
from ridgeline.engine.kernels.triton import load

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class RoundedOps:
    """Operators whose result is rounded for the 8-bit product that follows."""

    rms_norm: Callable[[Tensor, Tensor, float, Kind], tuple[Tensor, Tensor]]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, Kind], tuple[Tensor, Tensor, Tensor]]
    silu_mul: Callable[[Tensor, Kind], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PointwiseOps:
    """One implementation of each operator.

    `rms_norm(x_TC, gain_C, eps)`; `add_rms_norm(x_TC, y_TC, gain_C, eps)` returns x + y and its
    norm; `silu_mul(gate_up_T2I)` returns silu(gate) · up; `rotate(heads_TXD, cos_T1R, sin_T1R)`
    rotates in place (the first half of sin is negated). `rounded` has the first three with one
    argument more, the kind that their result is rounded to: 8-bit rows and their scale_T1.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    rounded: RoundedOps | None = None


def rms_norm(x_TC: Tensor, gain_C: Tensor, eps: float) -> Tensor:
    """x / rms(x) · gain, computed in float32."""
    return F.rms_norm(x_TC, gain_C.shape, gain_C, eps)


def add_rms_norm(x_TC: Tensor, y_TC: Tensor, gain_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, rounded to the dtype, and its norm."""
    sum_TC = x_TC + y_TC
    return sum_TC, F.rms_norm(sum_TC, gain_C.shape, gain_C, eps)


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) · up of rows that hold the gates before the ups."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def rotate(heads_TXD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> None:
    """Rotate the leading R dimensions of each head in place."""
    num_rotated = cos_T1R.shape[-1]
    part = heads_TXD[..., :num_rotated]
    part.copy_(part * cos_T1R + part.roll(num_rotated // 2, -1) * sin_T1R)


TORCH = PointwiseOps("torch", rms_norm, add_rms_norm, silu_mul, rotate)


class CompileClock:
    """Seconds that first calls of compiled functions took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, function: Function) -> Function:
        """The function; its first call is timed, which is when it is compiled."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if name in self.seconds:
                return function(*args)
            began_s = time.perf_counter()
            result = function(*args)
            self.seconds[name] = time.perf_counter() - began_s
            return result

        name = getattr(function, "__name__", "function")
        return cast(Function, call)


COMPILE_CLOCK = CompileClock()


@functools.cache
def compiled_ops() -> PointwiseOps:
    """The operators compiled by Inductor, for any number of rows.

    Inductor keeps its own cache of compiled kernels on disk (TORCHINDUCTOR_CACHE_DIR).
    """

    def compile_op(function: Function) -> Function:
        compiled = torch.compile(function, dynamic=True, fullgraph=True)
        return COMPILE_CLOCK.time(cast(Function, functools.wraps(function)(compiled)))

    return PointwiseOps(
        "inductor",
        compile_op(rms_norm),
        compile_op(add_rms_norm),
        compile_op(silu_mul),
        compile_op(rotate),
    )


@functools.cache
def triton_ops() -> PointwiseOps:
    """Ridgeline's Triton kernels."""
    norm = load("norm")
    rounded = RoundedOps(norm.rms_norm_q, norm.add_rms_norm_q, norm.silu_mul_q)
    return PointwiseOps("triton", norm.rms_norm, norm.add_rms_norm, norm.silu_mul, rotate, rounded)
