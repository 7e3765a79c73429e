"""Packs several models of different sizes onto devices with different memory.

A replica takes memory (weights, and the KV cache of its requests in flight) and a share of its
device's time. Replicas fit one device while both sums stay below their limits; they are interleaved
in time and affect each other only by waiting. A model that needs more time than one device has is
split into equal replicas.

A replica that exceeds one device is split by tensor parallelism over devices of one kind in one
node of 8, each of which holds its share.

The heuristic is best fit decreasing: largest first, on the device with the least remaining room
(Johnson 1973: within 11/9 of the fewest bins in one dimension; no such bound is known for two).
`min_devices` is a lower bound for any packing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from ridgeline.errors import DoesNotFit, UserError
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.modelspec.rewrite import extended
from ridgeline.plan.step_time.memory import RUNTIME_BYTES, UTILIZATION, require_context
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.parallel_layout import NODE_DEVICES, Layout
from ridgeline.plan.step_time.predict import time_point
from ridgeline.plan.step_time.replica import Replica, build_replica

MAX_BUSY = 0.7  # share of a device's time that is allocated; beyond it queues grow quickly
MAX_TOKENS = 10_000_000  # per prompt, and per answer
MAX_REPLICAS = 10_000  # of one model: as many as a stock may have devices
TYPICAL_BATCH = 32  # requests in flight on a well-used device
TP_SIZES = (1, 2, 4, 8)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and its load: requests per second of `isl` tokens in and `osl` out.

    `tp`: devices that a replica is split over (None: as few as hold it). `longest`: tokens of a
    request that each replica must hold, whatever its load; linear scaling extends the context to
    it, as `serve --max-model-len` does.
    """

    model: str
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    isl: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 1024
    osl: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    tp: Annotated[int, msgspec.Meta(ge=1, le=NODE_DEVICES)] | None = None
    longest: Annotated[int, msgspec.Meta(ge=0, le=2 * MAX_TOKENS)] = 0


class PackedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One device's part of a replica: its bytes and its share of device time.

    `number`: of the replica among those of its model; its `tp` devices have the same.
    """

    model: str
    memory_bytes: float
    busy: float
    in_flight: int
    tp: int = 1
    number: int = 0


class PackedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a node, and the replicas placed on it."""

    name: str
    usable_bytes: float
    node: int = 0
    replicas: tuple[PackedReplica, ...] = ()

    @property
    def memory_bytes(self) -> float:
        return sum(replica.memory_bytes for replica in self.replicas)

    @property
    def busy(self) -> float:
        return sum(replica.busy for replica in self.replicas)

    def has_room_for(self, replica: PackedReplica) -> bool:
        return (
            self.memory_bytes + replica.memory_bytes <= self.usable_bytes
            and self.busy + replica.busy <= MAX_BUSY + 1e-9
        )


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """The devices in use, and a lower bound on their number."""

    devices: tuple[PackedDevice, ...]
    min_devices: int


def usable_bytes(device: Accelerator) -> float:
    """Bytes of a device's memory available for weights and caches."""
    return device.memory_bytes * UTILIZATION - RUNTIME_BYTES


def replicas_of(tenant: Tenant, device: Accelerator, tp: int = 1) -> tuple[PackedReplica, ...]:
    """Split a tenant into equal replicas of `tp` devices that each fit the devices' time.

    Raises UserError if the model cannot run on this device, or would need too many of them.
    """
    machine = build_replica(
        load_planning_spec(tenant.model),
        device,
        Layout(tp=tp),
        weight_dtype=None
        if tenant.weight_dtype is None
        else parse_weight_dtype(tenant.weight_dtype),
        kv_dtype=None if tenant.kv_dtype is None else parse_kv_dtype(tenant.kv_dtype),
    )
    count = 1
    while True:
        replica = _packed_replica(tenant, machine, tenant.rate / count)
        if replica.busy <= MAX_BUSY:
            return tuple(msgspec.structs.replace(replica, number=i) for i in range(count))
        count = max(count + 1, math.ceil(count * replica.busy / MAX_BUSY - 1e-9))
        if count > MAX_REPLICAS:
            raise DoesNotFit(
                f"{tenant.model} needs too many replicas on {device.name}",
                value=f"{tenant.rate:g} requests/s",
                limit=f"{MAX_REPLICAS:,} replicas",
            )


def _packed_replica(tenant: Tenant, machine: Replica, rate: float) -> PackedReplica:
    # Time per request at a typical batch: a less loaded device needs more per request but has it to
    # spare. The number in flight follows from Little's law at the same batch.
    at = time_point(
        machine,
        OperatingPoint(model="", device="", isl=tenant.isl, osl=tenant.osl, batch=TYPICAL_BATCH),
    )
    in_flight = rate * at.request_s
    spread = math.ceil(in_flight + 3 * math.sqrt(in_flight)) or 1
    tp = machine.layout.tp
    layout = kv_layout(machine.spec)
    whole_blocks = math.ceil(tenant.longest / layout.block_tokens) * layout.block_tokens
    needed = max(
        spread * machine.cost.kv_bytes(tenant.isl + tenant.osl), layout.held_bytes(whole_blocks)
    )
    kv_bytes = needed * machine.kv_copies / tp
    return PackedReplica(
        model=tenant.model,
        memory_bytes=machine.resident_bytes + kv_bytes,
        busy=rate * at.device_s,
        in_flight=spread,
        tp=tp,
    )


def pack(
    tenants: Sequence[Tenant], stock: Mapping[str, int], catalogue: Mapping[str, Accelerator]
) -> Packing:
    """Place every tenant on the devices of `stock` (device name → count).

    Raises DoesNotFit naming the first tenant without room, or BadInput for one whose requests are
    longer than its model's context.
    """
    for tenant in tenants:
        spec = extended(load_planning_spec(tenant.model), tenant.longest)
        require_context(spec, tenant.isl, tenant.osl)
    devices = [
        PackedDevice(
            name=name, usable_bytes=usable_bytes(catalogue[name]), node=index // NODE_DEVICES
        )
        for name, count in stock.items()
        for index in range(count)
    ]
    kinds = {name: catalogue[name] for name in stock}
    needs = {tenant: _by_kind(tenant, kinds) for tenant in tenants}
    largest = max(usable_bytes(device) for device in kinds.values())
    order = sorted(tenants, key=lambda tenant: -_size(needs[tenant], largest))
    for tenant in order:
        _place(tenant, needs[tenant], devices)
    used = tuple(device for device in devices if device.replicas)
    return Packing(devices=used, min_devices=_lower_bound(used, largest))


def _by_kind(
    tenant: Tenant, kinds: Mapping[str, Accelerator]
) -> dict[str, tuple[PackedReplica, ...]]:
    by_kind, why = {}, ""
    for name, device in kinds.items():
        for tp in TP_SIZES if tenant.tp is None else (tenant.tp,):
            try:
                replicas = replicas_of(tenant, device, tp)
            except UserError as error:
                why = why or str(error)
                continue
            if replicas[0].memory_bytes <= usable_bytes(device):
                by_kind[name] = replicas
                break
    if not by_kind:
        raise DoesNotFit(
            f"{tenant.model} fits none of these devices, with up to {TP_SIZES[-1]} of a kind",
            value=f"{tenant.rate:g} requests/s",
            limit=", ".join(kinds),
            fix=why or "use larger devices, or fewer bits per weight",
        )
    return by_kind


def _size(needs: Mapping[str, tuple[PackedReplica, ...]], largest: float) -> float:
    """Relative size of one replica: the larger of memory and time, on its best kind of device."""
    return min(max(p[0].memory_bytes / largest, p[0].busy / MAX_BUSY) for p in needs.values())


def _place(
    tenant: Tenant, needs: Mapping[str, tuple[PackedReplica, ...]], devices: list[PackedDevice]
) -> None:
    """Place all replicas of a tenant on the kind of device that opens the fewest new devices;
    replicas already placed stay."""
    trials = []
    for name, replicas in needs.items():
        trial, opened = _fill(name, replicas, devices)
        if trial is not None:
            trials.append((opened, device_memory(trial, name), trial))
    if not trials:
        raise DoesNotFit(
            f"no room left for {tenant.model}",
            value=f"{len(next(iter(needs.values())))} replicas",
            limit=f"{len(devices)} devices",
            fix="use more devices, or fewer models",
        )
    devices[:] = min(trials, key=lambda trial: trial[:2])[2]


def device_memory(devices: Sequence[PackedDevice], name: str) -> float:
    """Usable bytes of one device of this kind; smaller devices are preferred."""
    return min(device.usable_bytes for device in devices if device.name == name)


def _fill(
    name: str, replicas: Sequence[PackedReplica], devices: Sequence[PackedDevice]
) -> tuple[list[PackedDevice] | None, int]:
    trial, opened = list(devices), 0
    for replica in replicas:
        options = [i for i, s in enumerate(trial) if s.name == name and s.has_room_for(replica)]
        fullest = sorted(options, key=lambda i: (not trial[i].replicas, -trial[i].memory_bytes))
        in_node: dict[int, list[int]] = {}
        for i in fullest:
            in_node.setdefault(trial[i].node, []).append(i)
        wide = [chosen[: replica.tp] for chosen in in_node.values() if len(chosen) >= replica.tp]
        if not wide:
            return None, 0
        best = min(wide, key=lambda chosen: sum(not trial[i].replicas for i in chosen))
        for i in best:
            opened += not trial[i].replicas
            held = (*trial[i].replicas, replica)
            trial[i] = msgspec.structs.replace(trial[i], replicas=held)
    return trial, opened


def _lower_bound(devices: Sequence[PackedDevice], largest: float) -> int:
    """Total memory over the largest device, or total time over `MAX_BUSY`, rounded up."""
    memory = sum(device.memory_bytes for device in devices)
    busy = sum(device.busy for device in devices)
    return max(1, math.ceil(memory / largest - 1e-9), math.ceil(busy / MAX_BUSY - 1e-9))
