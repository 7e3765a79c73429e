"""Several models of different sizes on devices of different memory: who shares with whom.

A replica takes memory (weights, and the KV cache of the requests that are in flight on it) and a
share of its device's time. Two replicas fit one device while both sums stay below their limits:
interleaved in time, neither sees the other but by waiting. A model that needs more time than a
device has is cut into equal replicas.

First fit, largest first, on the device that is left with the least room (best fit decreasing,
Johnson 1973: within 11/9 of the fewest bins in one dimension; no such promise holds in two).
`least_devices` is what no packing can go below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from ridgeline.errors import DoesNotFit, UserError
from ridgeline.hardware.catalogue import Accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.serving_formats import parse_kv_dtype, parse_weight_dtype
from ridgeline.plan.step_time.memory import RUNTIME_BYTES, UTILIZATION
from ridgeline.plan.step_time.predict import OperatingPoint, time_point
from ridgeline.plan.step_time.replica import Replica, build_replica

BUSY = 0.7  # of a device's time that may be promised: beyond it queues grow out of hand
MOST_TOKENS = 10_000_000  # of a prompt, and of an answer
COMPANY = 32  # requests in flight on a device that is well used


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and its load: requests per second of `isl` tokens in and `osl` out."""

    model: str
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    isl: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = 1024
    osl: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = 256
    weight_dtype: str | None = None
    kv_dtype: str | None = None


class PackedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a tenant on one kind of device: bytes and share of time."""

    model: str
    memory_bytes: float
    busy: float
    in_flight: int


class PackedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device and what is on it."""

    device: str
    usable_bytes: float
    pieces: tuple[PackedReplica, ...] = ()

    @property
    def memory_bytes(self) -> float:
        return sum(piece.memory_bytes for piece in self.pieces)

    @property
    def busy(self) -> float:
        return sum(piece.busy for piece in self.pieces)

    def takes(self, piece: PackedReplica) -> bool:
        return (
            self.memory_bytes + piece.memory_bytes <= self.usable_bytes
            and self.busy + piece.busy <= BUSY + 1e-9
        )


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """Every device that is used; how few there could be at the least."""

    shelves: tuple[PackedDevice, ...]
    least_devices: int


def usable_bytes(device: Accelerator) -> float:
    """Bytes for weights and caches."""
    return device.memory_bytes * UTILIZATION - RUNTIME_BYTES


def replicas_of(tenant: Tenant, device: Accelerator) -> tuple[PackedReplica, ...]:
    """The tenant as replicas on this kind of device. Raises what `build_replica` raises."""
    machine = build_replica(
        load_planning_spec(tenant.model),
        device,
        weight_dtype=None
        if tenant.weight_dtype is None
        else parse_weight_dtype(tenant.weight_dtype),
        kv_dtype=None if tenant.kv_dtype is None else parse_kv_dtype(tenant.kv_dtype),
    )
    count = 1
    while True:
        piece = _piece(tenant, machine, tenant.rate / count)
        if piece.busy <= BUSY:
            return (piece,) * count
        count = max(count + 1, math.ceil(count * piece.busy / BUSY - 1e-9))


def _piece(tenant: Tenant, machine: Replica, rate: float) -> PackedReplica:
    """Its time per request is that in the company of others: an emptier device takes longer for
    each and has the time. In flight by Little's law, at the same pace."""
    at = time_point(
        machine, OperatingPoint(model="", device="", isl=tenant.isl, osl=tenant.osl, batch=COMPANY)
    )
    in_flight = rate * at.request_s
    spread = math.ceil(in_flight + 3 * math.sqrt(in_flight)) or 1
    kv_bytes = spread * machine.cost.kv_bytes(tenant.isl + tenant.osl)
    return PackedReplica(
        model=tenant.model,
        memory_bytes=machine.resident_bytes + kv_bytes,
        busy=rate * at.device_s,
        in_flight=spread,
    )


def pack(
    tenants: Sequence[Tenant], stock: Mapping[str, int], catalogue: Mapping[str, Accelerator]
) -> Packing:
    """Place every tenant on the devices of `stock` (name: how many). DoesNotFit names the first
    one for which there is no room."""
    shelves = [
        PackedDevice(device=name, usable_bytes=usable_bytes(catalogue[name]))
        for name, count in stock.items()
        for _ in range(count)
    ]
    kinds = {name: catalogue[name] for name in stock}
    needs = {tenant: _by_kind(tenant, kinds) for tenant in tenants}
    largest = max(usable_bytes(device) for device in kinds.values())
    order = sorted(tenants, key=lambda tenant: -_size(needs[tenant], largest))
    for tenant in order:
        _place(tenant, needs[tenant], shelves)
    used = tuple(shelf for shelf in shelves if shelf.pieces)
    return Packing(shelves=used, least_devices=_least(used, largest))


def _by_kind(
    tenant: Tenant, kinds: Mapping[str, Accelerator]
) -> dict[str, tuple[PackedReplica, ...]]:
    found, why = {}, ""
    for name, device in kinds.items():
        try:
            pieces = replicas_of(tenant, device)
        except UserError as error:
            why = str(error)
            continue
        if pieces[0].memory_bytes <= usable_bytes(device):
            found[name] = pieces
    if not found:
        raise DoesNotFit(
            f"{tenant.model} fits none of these devices alone",
            value=f"{tenant.rate:g} requests/s",
            limit=", ".join(kinds),
            fix=why or "a device with more memory, narrower weights, or `ridgeline plan` with tp",
        )
    return found


def _size(needs: Mapping[str, tuple[PackedReplica, ...]], largest: float) -> float:
    """Of one replica, in the dimension in which it is larger, where it fits best."""
    return min(max(p[0].memory_bytes / largest, p[0].busy / BUSY) for p in needs.values())


def _place(
    tenant: Tenant, needs: Mapping[str, tuple[PackedReplica, ...]], shelves: list[PackedDevice]
) -> None:
    """All replicas on one kind of device, the kind that takes the fewest new devices; none moves
    what is placed."""
    trials = []
    for name, pieces in needs.items():
        trial, opened = _fill(name, pieces, shelves)
        if trial is not None:
            trials.append((opened, device_memory(trial, name), trial))
    if not trials:
        raise DoesNotFit(
            f"there is no room left for {tenant.model}",
            value=f"{len(next(iter(needs.values())))} replicas",
            limit=f"{len(shelves)} devices",
            fix="more devices, or fewer models",
        )
    shelves[:] = min(trials, key=lambda trial: trial[:2])[2]


def device_memory(shelves: Sequence[PackedDevice], name: str) -> float:
    """Usable bytes of one device of this kind: smaller ones are used up first."""
    return min(shelf.usable_bytes for shelf in shelves if shelf.device == name)


def _fill(
    name: str, pieces: Sequence[PackedReplica], shelves: Sequence[PackedDevice]
) -> tuple[list[PackedDevice] | None, int]:
    trial, opened = list(shelves), 0
    for piece in pieces:
        options = [i for i, s in enumerate(trial) if s.device == name and s.takes(piece)]
        if not options:
            return None, 0
        best = max(options, key=lambda i: (bool(trial[i].pieces), trial[i].memory_bytes))
        opened += not trial[best].pieces
        trial[best] = msgspec.structs.replace(trial[best], pieces=(*trial[best].pieces, piece))
    return trial, opened


def _least(shelves: Sequence[PackedDevice], largest: float) -> int:
    """No fewer than all memory over the largest device, or all time over what may be promised."""
    memory = sum(shelf.memory_bytes for shelf in shelves)
    busy = sum(shelf.busy for shelf in shelves)
    return max(1, math.ceil(memory / largest - 1e-9), math.ceil(busy / BUSY - 1e-9))
