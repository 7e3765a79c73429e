"""What quantising a model costs once, by method: text to read, arithmetic, and memory.

The arithmetic is counted from what `ridgeline.compress.methods` does, for each product W [O, I] and
T calibration tokens, and the time is the least that it takes at the device's peak in 32 bits:

    text            2 O I T per pass through the layers. smoothquant and llm-int8 read the text
                    once; gptq, awq and qat twice, rounded and not (error propagation)
    correlations    2 I² T for each distinct input, and as much for its difference from the original
    factor          4/3 I³: a Cholesky factor, the inverse, and its factor (gptq); 1/3 I³ to solve
                    for the compensation (gptq, awq, qat)
    rounding        O I² updates of later columns (gptq)
    search          22 scales, each with the error of 256 rows of W under the correlations (awq)
    ranges          about 60 operations per weight to search ranges, 12 more per round (hqq: 20)
    training        gptq's, then 8 O I per token and step: a student's two passes, and a teacher

A product of an expert counts for each of the experts; the router reads the same inputs. A 1.04 B
model in 4 bits took 27:40 (gptq) and 21:26 minutes (awq) on two cores of about 0.2 TFLOP/s
(docs/guides/quantise/), two and three times the bound: factors and searches run below the peak of
matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ridgeline.errors import BadInput
from ridgeline.modelspec.cost.parameters import attention_linears, count_layers, mlp_linears
from ridgeline.modelspec.model import LayerSpec, LinearSpec, ModelSpec
from ridgeline.plan.step_time.replica import Replica

WINDOW_TOKENS, WINDOWS, AWQ_WINDOWS = 256, 64, 32
"""Calibration text of `ridgeline quantize`, by default."""
TRAINING_STEPS, STEP_WINDOWS = 200, 4
SCALES, SEARCHED_ROWS = 22, 256
RANGE_OPERATIONS, HQQ_OPERATIONS = 60, 240
MOMENT_BYTES = 4
_BITS = {
    "rtn": ("int8", "int4", "nf4", "float8_e4m3"),
    "hqq": ("int4",),
    "gptq": ("int8", "int4"),
    "awq": ("int8", "int4"),
    "smoothquant": ("int8",),
    "llm-int8": ("int8", "llm-int8"),
    "qat": ("int4",),
}
_COMPARED = ("gptq", "awq", "qat")
_TRAINING_BYTES = 24  # per weight: latent, gradient, two moments, teacher, what a step makes


class QuantizationCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of making quantised weights on one device.

    `tokens` of text are read, `passes` times in all. `least_s`: `flops` at the device's peak in 32
    bits (16 where it has no other). `memory_bytes`: what the method holds next to the model.
    `propagation_flops`: of `flops`, those of the second pass and the compensation. `saved_s`:
    device seconds that a request then takes less than with the weights as stored, and
    `pays_after`: requests after which that is more than `least_s`; None if it never is.
    """

    method: str
    tokens: int
    passes: int
    flops: float
    propagation_flops: float
    least_s: float
    memory_bytes: float
    saved_s: float
    pays_after: int | None


class _Product(NamedTuple):
    """Linears that read one input: of how many layers and experts."""

    number: int
    num_in: int
    num_out: int


def quantization_cost(machine: Replica, method: str, saved_s: float) -> QuantizationCost:
    """What it costs to make the weights of a replica by a method. Raises BadInput for a method that
    does not make the replica's format, or that is unknown."""
    _check(method, machine.weight_dtype)
    products = list(_products(machine.spec))
    weights = sum(p.number * p.num_in * p.num_out for p in products)
    tokens = (AWQ_WINDOWS if method == "awq" else WINDOWS) * WINDOW_TOKENS
    if method in ("rtn", "hqq"):
        tokens = 0
    passes = (1 if tokens else 0) + (1 if method in _COMPARED else 0)
    propagation = _propagation_flops(products, tokens) if method in _COMPARED else 0.0
    flops = 2.0 * weights * tokens + propagation
    flops += weights * (HQQ_OPERATIONS if method == "hqq" else 0) + weights * RANGE_OPERATIONS
    flops += _method_flops(products, method, tokens)
    if method == "qat":
        flops += 8.0 * weights * STEP_WINDOWS * WINDOW_TOKENS * TRAINING_STEPS
    peaks = machine.device.peak_flops
    known = [peaks[name] for name in ("float32", "bfloat16", "float16") if name in peaks]
    peak = known[0] if known else machine.peaks.flops_s
    least_s = flops / peak
    return QuantizationCost(
        method=method,
        tokens=tokens,
        passes=passes,
        flops=flops,
        propagation_flops=propagation,
        least_s=least_s,
        memory_bytes=_memory_bytes(products, method, weights),
        saved_s=saved_s,
        pays_after=math.ceil(least_s / saved_s) if saved_s > 0 else None,
    )


def _check(method: str, weight_dtype: str) -> None:
    made = _BITS.get(method)
    if made is None:
        raise BadInput("unknown quantisation method", value=method, limit=", ".join(_BITS))
    if not weight_dtype.startswith(made):
        raise BadInput(
            f"{method} does not make this weight format",
            value=weight_dtype,
            limit=", ".join(made),
            fix=f"add --quantization {made[0]}",
        )


def _propagation_flops(products: list[_Product], tokens: int) -> float:
    """The pass over the rounded model, differences of inputs, and solving for the compensation."""
    total = 0.0
    for p in products:
        total += p.number * 2.0 * p.num_in * p.num_out * tokens
        total += p.number * (2.0 * p.num_in**2 * tokens + p.num_in**3 / 3)
        total += p.number * 2.0 * p.num_out * p.num_in**2
    return total


def _method_flops(products: list[_Product], method: str, tokens: int) -> float:
    """Correlations of the inputs, and what the method does with them."""
    total = 0.0
    for p in products:
        if method in _COMPARED:
            total += p.number * 2.0 * p.num_in**2 * tokens
        if method in ("gptq", "qat"):
            total += p.number * (4 / 3 * p.num_in**3 + p.num_out * p.num_in**2)
        if method == "awq":
            total += p.number * SCALES * 2.0 * min(SEARCHED_ROWS, p.num_out) * p.num_in**2
    return total


def _memory_bytes(products: list[_Product], method: str, weights: float) -> float:
    """Moments of the widest input and its difference; of qat, the whole model in training."""
    if method == "qat":
        return _TRAINING_BYTES * weights
    widest = max(p.num_in for p in products)
    if method in _COMPARED:
        return 2 * MOMENT_BYTES * widest**2
    return MOMENT_BYTES * max(p.num_in * p.num_out for p in products)


def _products(spec: ModelSpec) -> Iterator[_Product]:
    """The products of all layers: linears of attention and of feed-forward by their input."""
    for layer, num_layers in count_layers(spec).items():
        for count, linears in _inputs(layer):
            first = linears[0]
            num_out = sum(linear.num_out for linear in linears)
            yield _Product(count * num_layers, first.num_in, num_out)


def _inputs(layer: LayerSpec) -> Iterator[tuple[int, list[LinearSpec]]]:
    """Linears of a layer that read the same input, and how many such groups there are."""
    attention = list(attention_linears(layer.attention))
    mlp = list(mlp_linears(layer.mlp))
    hidden = attention[0].num_in
    yield 1, [linear for linear in attention[:-1] if linear.num_in == hidden]
    yield from ((1, [linear]) for linear in attention[:-1] if linear.num_in != hidden)
    yield 1, attention[-1:]
    experts = max(1, layer.mlp.num_experts)
    yield experts, mlp[:-1]
    yield experts, mlp[-1:]
