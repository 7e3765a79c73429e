"""The rates that the parts of a step reach on a data-sheet device, and the engine's overhead."""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.cost.parameters import count_layers
from ridgeline.modelspec.cost.serving_formats import ServingFormat, dense_format, serving_format
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.calibration.calibration import MeasuredDevice
from ridgeline.plan.calibration.published_efficiency import Efficiency


class PartRates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes/s and FLOP/s that the parts of a step reach on one device."""

    dense_bytes_s: float
    dense_flops_s: float
    expert_bytes_s: float
    expert_flops_s: float
    head_flops_s: float
    kv_bytes_s: float
    hidden_bytes_s: float
    decode_flops_s: float
    prompt_flops_s: float


def part_rates(
    spec: ModelSpec, device: Accelerator, eff: Efficiency, weight_dtype: str, rest_dtype: str
) -> PartRates | None:
    """The rates of a device without a calibration."""
    if isinstance(device, MeasuredDevice):
        return None
    every_token = dense_format(spec, weight_dtype, rest_dtype)
    expert = serving_format(weight_dtype)
    dense_in, expert_in = computed_in(every_token, device), computed_in(expert, device)
    wide = computed_in(serving_format(rest_dtype), device)
    latent = any(layer.attention.latent is not None for layer in count_layers(spec))
    decode = eff.latent_compute if latent else 1.0
    bytes_s = device.bandwidth_bytes_s
    return PartRates(
        dense_bytes_s=bytes_s * eff.bandwidth,
        dense_flops_s=device.peak(dense_in)
        * eff.compute_share(dense_in, eff.compute, blocks=every_token.blocks),
        expert_bytes_s=bytes_s * eff.expert_bandwidth,
        expert_flops_s=device.peak(expert_in)
        * eff.compute_share(expert_in, eff.expert_compute, blocks=expert.blocks),
        head_flops_s=device.peak(wide) * eff.compute,
        kv_bytes_s=bytes_s * eff.kv_bandwidth,
        hidden_bytes_s=bytes_s,
        decode_flops_s=device.peak(wide) * decode,
        prompt_flops_s=device.peak(wide) * eff.prompt_compute,
    )


def step_overhead_s(spec: ModelSpec, eff: Efficiency) -> float:
    """Seconds per step of the engine's host, over all layers."""
    layers = count_layers(spec)
    routed = sum(n for layer, n in layers.items() if layer.mlp.num_experts)
    latent = sum(n for layer, n in layers.items() if layer.attention.latent is not None)
    fixed = eff.step_s + eff.layer_s * len(spec.layers)
    return fixed + eff.routed_layer_s * routed + eff.latent_layer_s * latent


def computed_in(form: ServingFormat, device: Accelerator) -> str:
    """The dtype of the products of a weight format on a device. Raises BadInput without one."""
    for dtype in form.computed_in:
        if dtype in device.peak_flops:
            return dtype
    raise BadInput(
        f"no dense peak of {device.name} is known for this weight format",
        value=form.computed_in[0],
        limit=", ".join(device.peak_flops) or "none",
    )
