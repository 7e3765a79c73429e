"""Published models that fit this machine, with the speed that each is predicted to have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from ridgeline.errors import DoesNotFit, UserError
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.hardware.machine import Machine
from ridgeline.hardware.probe import probe
from ridgeline.modelspec.checkpoints.planning import hub_name, load_planning_spec
from ridgeline.modelspec.cost import (
    StepWork,
    cost_model,
    decode_work,
    held_kv_bytes,
    num_params,
    prefill_work,
    resident_weight_bytes,
    weight_bytes,
)
from ridgeline.modelspec.families.shapes import known_shapes, planning_config
from ridgeline.modelspec.families.unsupported import UNSUPPORTED, planned_as
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype
from ridgeline.plan.step_time.memory import UTILIZATION
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.report.result import Result
from ridgeline.workflows.planning.device_catalogue import default_device, read_catalogue

FORMATS = ("bfloat16", "int8", "int4")
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256


class PredictedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One client's speed with the weights in one format: decoding, and time to the first token."""

    tokens_per_s: float
    ttft_ms: float


class FittingModel(msgspec.Struct, frozen=True, kw_only=True):
    """A published model that fits. `hub`: its repository, if known; `runs`: in Ridgeline's engine.

    `speeds`: by weight format, for the formats in which it fits.
    """

    name: str
    hub: str | None
    num_params: int
    runs: bool
    speeds: dict[str, PredictedSpeed]


class FittingModels(Result, frozen=True, kw_only=True):
    """What `ridgeline models --fit` lists, smallest model first, and for which device.

    `is_disturbed`: other work took the cores while the machine was probed.
    """

    device: str
    is_calibrated: bool
    is_disturbed: bool = False
    memory_bytes: int
    num_too_large: int
    models: tuple[FittingModel, ...]


def list_fitting(calibration: Path | None = None) -> FittingModels:
    """The speed of every published model on this machine, with one client at a time.

    With a `calibration` of an engine it is predicted. Without one it is an upper bound: the time in
    which the probed memory delivers the bytes of a step, or the probed arithmetic its FLOPs. Raises
    BadInput for a bad calibration.
    """
    speed: Callable[[str, str], PredictedSpeed]
    if calibration is None:
        machine = probe()
        name, memory_bytes = "this machine", machine.memory_bytes
        is_disturbed = machine.disturbed
        speed = partial(_bound_speed, machine)
    else:
        rows = read_catalogue(None, calibration)
        device = rows[str(default_device(None, rows))]
        name, memory_bytes, is_disturbed = device.name, device.memory_bytes, False
        speed = partial(_predict_speed, device)
    models = [_fitting_model(model, speed) for model in known_shapes()]
    fitting = [model for model in models if model.speeds]
    return FittingModels(
        device=name,
        is_calibrated=calibration is not None,
        is_disturbed=is_disturbed,
        memory_bytes=memory_bytes,
        num_too_large=len(models) - len(fitting),
        models=tuple(sorted(fitting, key=lambda model: model.num_params)),
    )


def _fitting_model(name: str, speed: Callable[[str, str], PredictedSpeed]) -> FittingModel:
    speeds = {}
    for weight_format in FORMATS:
        # It may not fit in this format, or have too few positions for the prompt and the answer.
        with suppress(UserError):
            speeds[weight_format] = speed(name, weight_format)
    return FittingModel(
        name=name,
        hub=hub_name(name),
        num_params=num_params(load_planning_spec(name)),
        runs=_runs(name),
        speeds=speeds,
    )


def _runs(name: str) -> bool:
    """Whether the engine knows the shape's family; it may run on one that is not `dummy:NAME`."""
    known, reason = planned_as(planning_config(name))
    return not reason and known["model_type"] not in UNSUPPORTED


def _predict_speed(device: Accelerator, name: str, weight_format: str) -> PredictedSpeed:
    """By the calibrated step times. Raises DoesNotFit and the like."""
    point = OperatingPoint(
        model=name,
        device=device.name,
        isl=PROMPT_TOKENS,
        osl=OUTPUT_TOKENS,
        weight_dtype=weight_format,
    )
    prediction = predict(point, {device.name: device})
    return PredictedSpeed(tokens_per_s=1000 / prediction.tpot_ms, ttft_ms=prediction.ttft_ms)


def _bound_speed(machine: Machine, name: str, weight_format: str) -> PredictedSpeed:
    """By the roofline of the probed machine. Raises DoesNotFit."""
    spec = with_dtype(load_planning_spec(name), "bfloat16")
    if weight_format != "bfloat16":
        spec = apply_quantization(spec, weight_format)
    context = PROMPT_TOKENS + OUTPUT_TOKENS
    needed = resident_weight_bytes(spec) + held_kv_bytes(spec, context)
    if needed > machine.memory_bytes * UTILIZATION or context > spec.max_positions:
        raise DoesNotFit("the model does not fit", value=needed, limit=machine.memory_bytes)
    # Where bfloat16 has no fast instructions, the engine computes in float32; integers are faster.
    dtypes = ("bfloat16", "float32") if weight_format == "bfloat16" else ("int8", "float32")
    peak = max(machine.peak_flops(dtype) or 0.0 for dtype in dtypes)
    bandwidth = machine.bandwidth(weight_bytes(spec))

    def seconds(work: StepWork) -> float:
        return max(work.bytes / bandwidth, work.flops / peak)

    cost = cost_model(spec)
    return PredictedSpeed(
        tokens_per_s=1 / seconds(decode_work(cost, 1, PROMPT_TOKENS + OUTPUT_TOKENS // 2)),
        ttft_ms=1000 * seconds(prefill_work(cost, PROMPT_TOKENS)),
    )
