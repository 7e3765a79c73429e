"""What a measurement runs against: a server by its address, and the roofline of its hardware."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ridgeline.config.load import BenchTarget
from ridgeline.config.rules import refuse
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.measure.client.http_target import Endpoint
from ridgeline.measure.monitors.server_config import ELSEWHERE
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost import cost_model, weight_bytes
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import (
    apply_lm_head,
    apply_quantization,
    with_activations,
    with_dtype,
    with_kv_dtype,
)
from ridgeline.records import EngineInfo
from ridgeline.roofline import Peaks, PriceStep

if TYPE_CHECKING:
    from ridgeline.engine.config import ResolvedSettings

THIS_MACHINE = "here"


class RemoteServer(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible server. `model`: the one to request; None means the first it lists.

    `tokenizer`: the model whose tokenizer counts what the server does not.

    `shape` (a model directory or name) and `accelerator` (a catalogue name, `4xNAME`, or `here`)
    say what the server computes and on what, for its MFU and MBU.
    """

    url: str
    model: str | None = None
    endpoint: Endpoint = "auto"
    api_key: str | None = None
    tokenizer: str | None = None
    shape: str | None = None
    accelerator: str | None = None


Target = Settings | RemoteServer
"""An engine to open in this process, by its settings, or a server."""

SettingsOf = Callable[[str | None], Settings]
"""The engine settings for a model (None: the default one)."""


def bench_target(given: BenchTarget, settings_of: SettingsOf) -> Target:
    """The server at `url`, or an engine for the model. Raises BadInput."""
    if given.url is None:
        refuse(["--model"] if given.model and given.named_model else [], "with MODEL")
        refuse(["--tokenizer"] if given.tokenizer else [], "without --url")
        return settings_of(given.model or given.named_model)
    refuse(["MODEL"] if given.model and not given.accelerator else [], "with --url")
    refuse(["--accelerator"] if given.accelerator and not given.model else [], "without MODEL")
    return RemoteServer(
        url=given.url,
        model=given.served_model_name or given.named_model,
        shape=given.model,
        accelerator=given.accelerator,
        endpoint=given.endpoint or "auto",
        api_key=given.api_key,
        tokenizer=given.tokenizer,
    )


class ModelOnDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A model's work per step and the peaks of the device it runs on: the roofline of a run."""

    price: PriceStep
    peaks: Peaks
    name: str


def engine_on_machine(resolved: ResolvedSettings) -> ModelOnDevice | None:
    """The roofline of an engine here; None if this machine cannot be probed in its dtype."""
    from ridgeline.hardware.probe import probe

    try:
        machine = probe()
    except CannotRun:
        return None
    dtype = resolved.spec.layers[0].mlp.gate.format.activations
    if resolved.device.startswith("cuda"):
        number = int(resolved.device.partition(":")[2] or 0)
        if number >= len(machine.gpus):  # probed while other devices were visible
            return None
        gpu = machine.gpus[number]
        flops_s, bytes_s = gpu.gemm_flops.get(dtype), gpu.read_bandwidth_bytes_s
    else:
        flops_s = machine.peak_flops(dtype)
        bytes_s = machine.bandwidth(weight_bytes(resolved.spec))
    if flops_s is None or bytes_s is None:
        return None
    source = "probe" + (" (disturbed: figures are too low)" if machine.disturbed else "")
    peaks = Peaks(flops_s=flops_s, bytes_s=bytes_s, dtype=dtype, source=source)
    return ModelOnDevice(price=cost_model(resolved.spec).step, peaks=peaks, name="this machine")


def server_on_device(server: RemoteServer, info: EngineInfo | None = None) -> ModelOnDevice | None:
    """The roofline of a server; None if it is not known what it runs on.

    `info`: the server's own account of its settings, once it has given one. Raises BadInput.
    """
    if server.shape is None or server.accelerator is None:
        return None
    return model_on_device(server.shape, server.accelerator, info)


def model_on_device(model: str, accelerator: str, info: EngineInfo | None = None) -> ModelOnDevice:
    """The roofline of `model` on a catalogue accelerator, `4xNAME`, or `here`. Raises BadInput.

    `info`: the settings of a Ridgeline server, whose weight and KV formats are then assumed. If it
    is of a twin, the peaks are those of the device in the twin's time.
    """
    spec = _with_served_formats(load_planning_spec(model), info)
    dtype = spec.layers[0].mlp.gate.format.activations
    if accelerator == THIS_MACHINE:
        name, peaks = f"this machine, {dtype}", _probed_peaks(spec, dtype)
    else:
        name, peaks = catalogue_peaks(accelerator, dtype)
    peaks = sped_up(peaks, 1.0 if info is None else info.twin_speed)
    return ModelOnDevice(price=cost_model(spec).step, peaks=peaks, name=name)


def catalogue_peaks(accelerator: str, dtype: str) -> tuple[str, Peaks]:
    """Description and peaks of a catalogue accelerator, `NAME` or `4xNAME`. Raises BadInput."""
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", accelerator)
    if match is None:
        raise BadInput("--accelerator is empty", fix="name one, as h100-sxm or 4xh100-sxm")
    count, row = int(match[1] or 1), find_accelerator(match[2])
    peaks = Peaks(
        flops_s=count * row.peak(dtype),
        bytes_s=count * row.bandwidth_bytes_s,
        dtype=dtype,
        source=f"data sheet of {row.name} (dense), which no program reaches",
    )
    return f"{count} x {row.name}, {dtype}", peaks


def sped_up(peaks: Peaks, speed: float) -> Peaks:
    """The peaks of a twin of the device, per second of real time. `speed`: its modelled seconds
    in one."""
    if speed == 1:
        return peaks
    return peaks.scaled(speed, f"{peaks.source}; times {speed:g}, the speed of its twin")


def _probed_peaks(spec: ModelSpec, dtype: str) -> Peaks:
    from ridgeline.hardware.probe import probe

    machine = probe()
    flops_s, bytes_s = machine.peak_flops(dtype), machine.bandwidth(weight_bytes(spec))
    if flops_s is None or bytes_s is None:
        raise BadInput("this machine was not probed in the model's dtype", value=dtype)
    source = "probe of this machine" + (", disturbed: too low" if machine.disturbed else "")
    return Peaks(flops_s=flops_s, bytes_s=bytes_s, dtype=dtype, source=source)


def _with_served_formats(spec: ModelSpec, info: EngineInfo | None) -> ModelSpec:
    """The spec as a Ridgeline server computes it; as stored for any other server."""
    if info is None or info.device == ELSEWHERE or not info.compute_dtype:
        return spec
    settings = info.settings
    spec = with_dtype(spec, info.compute_dtype)
    if isinstance(settings.get("quantization"), str):
        spec = apply_quantization(spec, str(settings["quantization"]))
    if isinstance(settings.get("lm_head_quantization"), str):
        spec = apply_lm_head(spec, str(settings["lm_head_quantization"]))
    if settings.get("activations") not in (None, "int8"):
        spec = with_activations(spec, str(settings["activations"]))
    if settings.get("kv_cache_dtype") not in (None, "auto"):
        spec = with_kv_dtype(spec, str(settings["kv_cache_dtype"]))
    return spec
