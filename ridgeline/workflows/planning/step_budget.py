"""`ridgeline quantize --step-budget MS`: the mean bits whose weights this machine reads in time.

A decode step of few sequences takes as long as its weights are read:

    ms = (layer weights · bits / 8 + LM head) / (read bandwidth · share)

What a step does besides (attention over its cache, the host) comes on top and is not in the budget.
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
from ridgeline.workflows.calibrate.step_passes import num_threads

READ_SHARE = 0.9
"""Of the read bandwidth, by the INT4 and INT8 kernels with one row (docs/concepts/kernels.md)."""
LIKELY_BITS = 5  # the size that the bandwidth is measured at: caches read faster
MOST_BITS = 8.0


class StepBudget(NamedTuple):
    """Mean bits per weight of the layers, scales included; the rest is how they were found."""

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
    """Bits for a budget in milliseconds. Raises BadInput where the LM head alone takes longer, and
    where 8 bits are read in time; CannotRun for experts, of which a step reads only some."""
    from ridgeline.compress.methods.mixed_precision import num_weights

    if not (math.isfinite(milliseconds) and milliseconds > 0):
        raise BadInput("--step-budget must be above zero", value=milliseconds)
    spec = with_dtype(load_spec(model), "float32")
    if cost_model(spec).experts:
        raise CannotRun(
            "what a step reads of experts depends on its tokens", value=model, fix="--bits-budget"
        )
    count, head_bytes = num_weights(spec), _head_bytes(spec, lm_head_bits)
    likely = int(count * LIKELY_BITS / 8 + head_bytes)
    rate = READ_SHARE * measure.read_bandwidth(likely, num_threads()).per_s
    bits = 8 * (rate * milliseconds / 1e3 - head_bytes) / count
    if bits <= 0:
        raise BadInput(
            "the LM head alone is not read in so short a time",
            value=f"{milliseconds:g} ms",
            limit=f"{1e3 * head_bytes / rate:.3g} ms",
            fix="a larger --step-budget, or --lm-head-bits 8",
        )
    if bits > MOST_BITS:
        raise BadInput(
            "all weights are read in time at 8 bits",
            value=f"{milliseconds:g} ms",
            limit=f"{1e3 * (count + head_bytes) / rate:.3g} ms",
            fix="--bits 8",
        )
    return StepBudget(bits, milliseconds, rate, head_bytes)


def _head_bytes(spec: ModelSpec, lm_head_bits: int | None) -> float:
    """Of the head as it will be read; one that is stored in 16 bits is kept in them."""
    if lm_head_bits is None:
        lm_head_bits = 32 if spec.stored_dtype == "float32" else 16
    return spec.vocab_size * spec.hidden_size * lm_head_bits / 8
