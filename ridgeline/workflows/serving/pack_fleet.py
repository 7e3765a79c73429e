"""Places the models of a fleet file on its stock of devices, by their rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from ridgeline.config.units import parse_count
from ridgeline.errors import BadInput
from ridgeline.fleet.ray.fleet_file import FleetFile, FleetModel
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.plan.fleet.packing import (
    MAX_BUSY,
    PackedReplica,
    Tenant,
    pack,
    usable_bytes,
)
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.workflows.planning.device_catalogue import parse_stock, read_catalogue

_SHARE_STEP = 0.01  # of a device, in which Ray counts
_LONGEST_REQUEST = 4
"""Times the mean request: the longest that a server takes where `serve` sets no --max-model-len."""


def pack_fleet(fleet: FleetFile) -> FleetFile:
    """The fleet with replicas, gpus and resources in place of rates; as it is without rates.

    A model has one entry per kind of device that it is placed on. Raises UserError if the stock
    does not suffice.
    """
    loaded = [model for model in fleet.models if model.rate is not None]
    if not loaded:
        return fleet
    catalogue = read_catalogue(None)
    tenants = [_tenant(model) for model in loaded]
    packing = pack(tenants, parse_stock(fleet.stock, catalogue), catalogue)
    placed = list[FleetModel]()
    for model in loaded:
        counts: Counter[tuple[str, PackedReplica]] = Counter()
        for device in packing.devices:
            for part in device.replicas:
                if part.model == model.model:
                    counts[device.name, msgspec.structs.replace(part, number=0)] += 1
        for (name, part), num_parts in counts.items():
            placed.append(_entry(model, catalogue[name], part, num_parts // part.tp))
    others = [model for model in fleet.models if model.rate is None]
    return msgspec.structs.replace(fleet, models=(*others, *placed))


def _tenant(model: FleetModel) -> Tenant:
    assert model.rate is not None
    return Tenant(
        model=model.model,
        rate=model.rate,
        isl=model.input_len,
        osl=model.output_len,
        weight_dtype=model.quantization,
        kv_dtype=_given(model, "--kv-cache-dtype"),
        longest=_max_model_len(model),
    )


def _given(model: FleetModel, flag: str) -> str | None:
    """The value of a flag in the model's `serve`; None without it."""
    words = [part for word in model.serve for part in word.split("=", 1)]
    return words[words.index(flag) + 1] if flag in words[:-1] else None


def _max_model_len(model: FleetModel) -> int:
    """Tokens of the longest request that a server takes: at least those of the mean one."""
    given, mean = _given(model, "--max-model-len"), model.input_len + model.output_len
    if given is None:
        return min(_LONGEST_REQUEST * mean, load_planning_spec(model.model).max_positions)
    try:
        longest = parse_count(given)
    except ValueError:
        raise BadInput(
            "--max-model-len in `serve` is not a number of tokens", value=given
        ) from None
    if longest < mean:
        raise BadInput(
            f"--max-model-len of {model.name} is shorter than its requests",
            value=f"{longest:,} tokens",
            limit=f">= input_len + output_len = {mean:,}",
            fix="raise it, or leave it out",
        )
    return longest


def _entry(
    model: FleetModel, device: Accelerator, part: PackedReplica, num_replicas: int
) -> FleetModel:
    """The servers of a model on one kind of device."""
    share = max(part.memory_bytes / usable_bytes(device), part.busy / MAX_BUSY)
    # Ray gives a process whole GPUs, or a part of one.
    gpus = float(part.tp) if part.tp > 1 else min(1.0, math.ceil(share / _SHARE_STEP) * _SHARE_STEP)
    replica = _replica(model, device, part)
    num_bytes = (part.memory_bytes - replica.resident_bytes) * part.tp
    flags = ["--kv-cache-memory-bytes", str(round(num_bytes))]
    decided = {
        "--max-model-len": str(_max_model_len(model)),
        "--kv-cache-dtype": replica.spec.kv_dtype,
    }
    for flag, value in decided.items():
        flags += [] if _given(model, flag) else [flag, value]
    if part.tp > 1:
        flags += ["--tensor-parallel-size", str(part.tp)]
    if model.quantization is not None:
        flags += ["--quantization", model.quantization]
    return msgspec.structs.replace(
        model,
        replicas=num_replicas,
        gpus=round(gpus, 2),
        resources=_resources(device.name, round(gpus, 2)),
        rate=None,
        placed_on=device.name,
        serve=(*model.serve, *flags),
    )


def _resources(device: str, gpus: float) -> Mapping[str, float]:
    """The custom resource that nodes with this device have: `ray start --resources`."""
    return {device: gpus}


def _replica(model: FleetModel, device: Accelerator, part: PackedReplica) -> Replica:
    """What was placed: its weights, and the dtype of its KV cache."""
    weights, kv_dtype = model.quantization, _given(model, "--kv-cache-dtype")
    return build_replica(
        load_planning_spec(model.model),
        device,
        Layout(tp=part.tp),
        weight_dtype=None if weights is None else parse_weight_dtype(weights),
        kv_dtype=None if kv_dtype is None else parse_kv_dtype(kv_dtype),
    )
