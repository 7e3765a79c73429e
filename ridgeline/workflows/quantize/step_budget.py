"""Bits per weight for a time budget: what this machine can read within one decode step.

A decode step of few sequences takes as long as reading the weights:

    ms = (layer weights · bits / 8 + LM head) / (read bandwidth · share)

Attention over the KV cache and the host's work come on top and are not part of the budget.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware import measure
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import cost_model
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype
from ridgeline.report.numbers import rounded
from ridgeline.workflows.calibrate.machine_rates import num_threads

READ_SHARE = 0.9
"""Of the read bandwidth, by the INT4 and INT8 kernels with one row (docs/concepts/kernels.md)."""
LIKELY_BITS = 5  # the bandwidth is measured for weights of this size: caches read faster
MAX_BITS = 8.0


class StepBudget(NamedTuple):
    """Mean bits per weight of the layers, scales included, and how they follow from the budget."""

    bits: float
    milliseconds: float
    rate_bytes_s: float
    head_bytes: float

    def __str__(self) -> str:
        return (
            f"weights read in {self.milliseconds:g} ms at {self.rate_bytes_s / 1e9:.1f} GB/s, the "
            f"LM head's {self.head_bytes / 1e6:,.1f} MB among them: {self.bits:.3f} bits per weight"
        )


def step_budget(model: str, milliseconds: float, lm_head_bits: int | None) -> StepBudget:
    """Bits for a budget in milliseconds.

    Raises BadInput if the LM head alone takes longer, or 8 bits fit; CannotRun for a model with
    experts, of which a step reads only some.
    """
    from ridgeline.compress.methods.mixed_precision import num_weights

    if not (math.isfinite(milliseconds) and milliseconds > 0):
        raise BadInput("--step-budget must be positive", value=milliseconds)
    spec = with_dtype(load_spec(model), "float32")
    if cost_model(spec).experts:
        raise CannotRun(
            "which experts a step reads depends on its tokens: there is no step budget",
            value=model,
            fix="--bits-budget",
        )
    num_layer_weights, head_bytes = num_weights(spec), _head_bytes(spec, lm_head_bits)
    likely = int(num_layer_weights * LIKELY_BITS / 8 + head_bytes)
    rate = READ_SHARE * measure.read_bandwidth(likely, num_threads()).per_s
    bits = 8 * (rate * milliseconds / 1e3 - head_bytes) / num_layer_weights
    if bits <= 0:
        raise BadInput(
            "the budget is shorter than reading the LM head alone",
            value=f"{milliseconds:g} ms",
            limit=f"{rounded(1e3 * head_bytes / rate)} ms",
            fix="a larger --step-budget, or --lm-head-bits 8",
        )
    if bits > MAX_BITS:
        raise BadInput(
            "8 bits per weight fit the budget: nothing is gained by fewer",
            value=f"{milliseconds:g} ms",
            limit=f"{rounded(1e3 * (num_layer_weights + head_bytes) / rate)} ms",
            fix="--bits 8",
        )
    return StepBudget(bits, milliseconds, rate, head_bytes)


def _head_bytes(spec: ModelSpec, lm_head_bits: int | None) -> float:
    """Bytes of the LM head as it will be read; one stored in 16 bits keeps them."""
    if lm_head_bits is None:
        lm_head_bits = 32 if spec.stored_dtype == "float32" else 16
    return spec.vocab_size * spec.hidden_size * lm_head_bits / 8
