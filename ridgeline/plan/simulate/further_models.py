"""Further models on the devices of a simulated replica: their load and their share of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ridgeline.errors import DoesNotFit
from ridgeline.plan.step_time.memory import UTILIZATION, MemoryLimits, memory_budget
from ridgeline.plan.step_time.replica import Replica

MAX_TOKENS = 10_000_000  # per prompt, and per answer


class FurtherModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and its load: requests per second of `isl` tokens in and `osl` out.

    `replicas`: how many of the fleet's replicas have it, the first ones (None: all).
    `gpu_memory_utilization`: its share of each device's memory (None: its weights and working
    memory, and an equal part of what all models leave).
    """

    model: str
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    isl: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 1024
    osl: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 256
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    replicas: Annotated[int, msgspec.Meta(ge=1)] | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


def divide_memory(
    machines: Sequence[Replica], limits: MemoryLimits, wanted: Sequence[float | None]
) -> list[float]:
    """The share of a device's memory that each of the models on it gets.

    Raises DoesNotFit if their weights and working memory exceed the device.
    """
    fixed: list[float] = []
    for machine, share in zip(machines, wanted, strict=True):
        budget = memory_budget(machine, limits)
        needed = budget.weight_bytes + budget.activation_bytes + budget.runtime_bytes
        fixed.append(needed / budget.device_bytes if share is None else share)
    left = UTILIZATION - sum(fixed)
    if left < 0:
        names = " and ".join(machine.spec.name for machine in machines)
        raise DoesNotFit(
            f"{names} together do not fit {machines[0].device.name}",
            value=f"{sum(fixed):.0%} of its memory",
            limit=f"{UTILIZATION:.0%}",
            fix="fewer models per device, smaller weights, or a larger --tensor-parallel-size",
        )
    num_open = max(1, sum(share is None for share in wanted))
    return [
        share + left / num_open if given is None else share
        for share, given in zip(fixed, wanted, strict=True)
    ]
