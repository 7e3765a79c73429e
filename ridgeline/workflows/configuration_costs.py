"""What the model's spec and the machine's probe say about engine settings, before anything is run.

Every answer is computed once per configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.engine.build import make_scheduler
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.errors import BadInput
from ridgeline.hardware.machine import Machine
from ridgeline.measure.workload import LoadRequest
from ridgeline.modelspec.cost import (
    CostModel,
    cost_model,
    kv_bytes_per_token,
    num_params,
    step_work,
)
from ridgeline.plan.simulate.kv_tiers import add_tiers, tier_sizes
from ridgeline.roofline import Peaks, PriceStep, bound
from ridgeline.workflows.load.tokenized_workload import workload_facts


class StepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The roofline bound of one configuration's steps on one machine."""

    model: CostModel
    peaks: Peaks

    def bound_s(self, shapes: Sequence[tuple[int, int]], num_sampled: int) -> float:
        """Least seconds of a step. A shape is (new tokens, cached tokens) of a run."""
        return bound(step_work(self.model, shapes, num_sampled), self.peaks).seconds


class ConfigurationCosts:
    """Resolved settings, step costs and peaks of configurations on one machine.

    `elsewhere`: the machine is a record of another one, whose memory counts in place of this one's.
    """

    def __init__(self, machine: Machine, *, elsewhere: bool = False) -> None:
        self._machine, self._elsewhere = machine, elsewhere
        self.resolved = cache(
            partial(resolve, memory_bytes=machine.memory_bytes if elsewhere else None)
        )
        self._model = cache(self._cost_model)
        self.peaks = cache(self._peaks)

    def _cost_model(self, settings: Settings) -> CostModel:
        return cost_model(self.resolved(settings).spec)

    def scheduler(self, settings: Settings) -> Any:
        """A fresh scheduler, as the engine would have it, tiers of the KV cache included."""
        resolved = self.resolved(settings)
        scheduler = make_scheduler(resolved)
        sizes = tier_sizes(
            resolved.kv_tier_memory, resolved.kv_tier_size, resolved.kv_tier_dir is not None
        )
        block_bytes = scheduler.limits.kv_layout.block_bytes(resolved.block_size)
        add_tiers(scheduler, sizes, block_bytes)
        return scheduler

    def price(self, settings: Settings) -> PriceStep:
        """FLOPs and bytes of a step."""
        return self._model(settings).step

    def bounds(self, settings: Settings) -> StepBounds:
        return StepBounds(model=self._model(settings), peaks=self.peaks(settings))

    def _peaks(self, settings: Settings) -> Peaks:
        """The rates for this configuration's arithmetic and working set."""
        resolved, machine = self.resolved(settings), self._machine
        nbytes = self._model(settings).fixed_weight_bytes + self._model(settings).head_weight_bytes
        rates = _flops_s(machine, resolved)
        kind = resolved.spec.layers[-1].mlp.gate.format.kind
        integer = kind in ("int8", "int4", "int8_sparse24") and "int8" in rates
        dtype = "int8" if integer else resolved.dtype
        return Peaks(
            flops_s=rates[dtype],
            bytes_s=_bandwidth_bytes_s(machine, resolved, nbytes),
            dtype=dtype,
            source="peaks of the data sheet"
            if self._elsewhere
            else f"measured on this machine, reading {nbytes / 1e6:.0f} MB repeatedly",
            flops_s_by_dtype=rates,
        )

    def model_facts(self, settings: Settings) -> dict[str, Value]:
        """Name, size and formats of the model."""
        resolved = self.resolved(settings)
        return {
            "model_name": resolved.spec.name,
            "model_params": num_params(resolved.spec),
            "model_compute_dtype": resolved.dtype,
            "model_stored_dtype": resolved.spec.stored_dtype,
            "model_weights": resolved.spec.layers[-1].mlp.gate.format.kind,
            "model_kv_bytes_per_token": kv_bytes_per_token(resolved.spec),
            "model_experts": resolved.spec.layers[-1].mlp.num_experts,
        }


def _flops_s(machine: Machine, resolved: ResolvedSettings) -> dict[str, float]:
    """FLOP/s by dtype that this configuration's matrix products could reach."""
    if resolved.device.startswith("cuda") and machine.gpus:
        rates = dict(machine.gpus[0].gemm_flops)
    else:
        measured = {name: machine.peak_flops(name) for name in (resolved.dtype, "int8")}
        rates = {name: rate for name, rate in measured.items() if rate is not None}
    if resolved.dtype not in rates:
        raise BadInput("this machine was not probed in the model's dtype", value=resolved.dtype)
    return rates


def _bandwidth_bytes_s(machine: Machine, resolved: ResolvedSettings, nbytes: float) -> float:
    if resolved.device.startswith("cuda") and machine.gpus:
        return machine.gpus[0].read_bandwidth_bytes_s or machine.best_bandwidth_bytes_s
    return float(machine.bandwidth(nbytes))


def base_facts(
    machine: Machine, costs: ConfigurationCosts, settings: Settings, sample: Sequence[LoadRequest]
) -> dict[str, Value]:
    """Facts about the machine, the model and the workload."""
    return {**machine_facts(machine), **costs.model_facts(settings), **workload_facts(sample)}


def machine_facts(machine: Machine) -> dict[str, Value]:
    """CPU, memory and GPUs, as probed."""
    facts: dict[str, Value] = {
        "machine_cpu": machine.cpu_model,
        "machine_usable_cores": machine.usable_cores,
        "machine_memory_gb": round(machine.memory_bytes / 1e9, 1),
        "machine_memory_bandwidth_gb_s": round(machine.best_bandwidth_bytes_s / 1e9, 1),
        "machine_disturbed_while_probed": machine.disturbed,
    }
    for index, gpu in enumerate(machine.gpus):
        facts[f"machine_gpu_{index}"] = gpu.name
    return facts
