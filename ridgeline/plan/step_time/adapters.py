"""LoRA adapters on a replica: their memory, and the bytes and FLOPs that they add to a step.

Every adapter has two small matrices per linear, in the wide dtype of the device. A step in which
all of them are used reads them all; each token passes through those of one adapter. The launches of
the small products are not counted: on fast devices with few sequences they cost more than the
bytes.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.cost.adapters import adapter_params
from ridgeline.plan.step_time.replica import Replica

BYTES = 2
"""Of a weight of an adapter: bfloat16 or float16."""
DEFAULT_RANK = 16


class AdapterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How many adapters of a rank are loaded on a replica, and used in every step."""

    count: int = 0
    rank: int = DEFAULT_RANK

    def on(self, machine: Replica) -> Replica:
        """The replica with these adapters. Raises BadInput, CannotRun."""
        return with_adapters(machine, self.count, self.rank) if self.count else machine


NO_ADAPTERS = AdapterLoad()


def with_adapters(machine: Replica, num_adapters: int, rank: int) -> Replica:
    """The replica with that many adapters of a rank loaded and in use.

    Raises CannotRun on a calibrated machine, whose times are those of layers without adapters, and
    BadInput for a model without a linear that adapters can add to.
    """
    if machine.calibration is not None:
        raise CannotRun(
            "adapters cannot be predicted by a calibration: it timed fused layers, and adapters"
            " need layers that run product by product",
            value=f"{num_adapters} adapters",
            fix="leave out --calibration or --max-loras, or measure: benchmarks/bench_lora.py",
        )
    params = adapter_params(machine.spec, rank)
    if not params:
        raise BadInput("the model has no linear that adapters add to", value=machine.spec.name)
    layout = machine.layout
    nbytes = num_adapters * params * BYTES
    return replace(
        machine,
        resident_bytes=machine.resident_bytes + nbytes / layout.tp / layout.pp,
        shared_bytes=machine.shared_bytes + nbytes / layout.tp,
        linear_flops=machine.linear_flops + 2 * params / layout.tp,
    )
