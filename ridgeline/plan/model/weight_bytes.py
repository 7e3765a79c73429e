"""Bytes of a model's weights, as published and as served: which parts take which format."""

from __future__ import annotations

from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost.serving_formats import WEIGHTS, WIDE, WeightFormat
from ridgeline.plan.calibration.calibration import MeasuredDevice
from ridgeline.plan.model.outline import Outline


def shared_form(outline: Outline, weight_dtype: str, kept: str) -> WeightFormat:
    """Of the linears that every token uses."""
    form = WEIGHTS[weight_dtype]
    return WEIGHTS[kept] if form.spares_shared and outline.experts else form


def layer_bytes(
    outline: Outline, weight_dtype: str, kept: str
) -> tuple[float, tuple[float, ...], float]:
    """What every token uses; one expert of every routed layer, by kind; all experts. No tables."""
    form = WEIGHTS[weight_dtype]
    shared = shared_form(outline, weight_dtype, kept).nbytes(
        outline.shared_params, outline.shared_rows
    )
    shared += outline.small_params * WEIGHTS[kept].bits / 8
    experts = tuple(g.num_layers * form.nbytes(g.params, g.rows) for g in outline.experts)
    routed = sum(n * g.num_experts for n, g in zip(experts, outline.experts, strict=True))
    return shared, experts, routed


def checkpoint_bytes(outline: Outline) -> float:
    """Of the files as they are published, whatever they are served in."""
    stored = outline.stored_dtype
    shared, _, routed = layer_bytes(outline, outline.packed or stored, stored)
    num_tables = 1 if outline.tied_embeddings else 2
    return shared + routed + num_tables * outline.head_params * WEIGHTS[stored].bits / 8


def served_dtype(outline: Outline, device: Accelerator, weight_dtype: str | None = None) -> str:
    """What is not quantised, the KV cache by default too: as the weights are asked for, or as
    stored. A float32 checkpoint is served in 16 bits wherever float32 has no rate of its own, as
    engines on accelerators do by themselves. On a calibrated device, what its engine makes of it.
    """
    if isinstance(device, MeasuredDevice):
        return device.calibration.dense_dtype
    if weight_dtype in WIDE:
        return weight_dtype
    stored = outline.stored_dtype
    return "bfloat16" if stored == "float32" and stored not in device.peak_flops else stored


def table_bytes(outline: Outline, kept: str) -> float:
    """An embedding table of its own: bfloat16 stays as it is stored."""
    dtype = "bfloat16" if outline.stored_dtype == "bfloat16" else kept
    return WEIGHTS[dtype].nbytes(outline.head_params, outline.vocab_size)
