"""What a calibration measures of the device besides steps: its reads, arithmetic and memory."""

from __future__ import annotations

from functools import cached_property
from statistics import median
from typing import Literal, Protocol

import msgspec

from ridgeline.hardware import measure, system
from ridgeline.plan.calibration.calibration import MachineMemory

BANDWIDTH_BYTES = tuple(size << 20 for size in (1, 4, 8, 16, 24, 32, 48, 64, 128, 512))
MULTIPLIED_AS = {"float32": "float32", "bfloat16": "bf16", "int8": "int16", "int4": "int4"}
"""Weight format → the kind of multiply-add that its kernel uses on a CPU."""
MULTIPLIED_ON_GPU = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "int4": "bfloat16",
}
"""Weight format → the dtype of its products on a GPU."""
TYPICAL_CORE_BYTES_S = 20e9
"""Memory reads of the server core that the fit expects."""


class MachineSpeed(msgspec.Struct, frozen=True):
    """Memory reads in bytes/s and arithmetic in operations/s, at one moment."""

    read_bytes_s: float
    ops_s: float


class MachineRates(Protocol):
    """The device of a calibration.

    `work_speed`: how many times as fast as a server core it works.
    """

    name: str
    kind: Literal["cpu", "gpu"]

    @property
    def work_speed(self) -> float: ...

    def memory(self) -> MachineMemory: ...

    def prepare(self) -> None:
        """Measure what needs the memory that an open engine takes.

        Raises CannotRun if there is too little of it.
        """

    def speed(self) -> MachineSpeed:
        """The speed now, in float32."""

    def read_rates(self) -> dict[str, float]:
        """Read bandwidth by working set."""

    def peak_flops(self) -> dict[str, float]: ...

    def kernel_ops_s(self, float32_ops_s: float) -> dict[str, float]:
        """Operations/s of the multiply-adds that each weight format's kernel uses."""


class RatesOfCpu:
    """The CPU, with all cores that this process may use."""

    kind: Literal["cpu", "gpu"] = "cpu"
    work_speed = 1.0

    def __init__(self) -> None:
        self.name = system.cpu_model()

    def memory(self) -> MachineMemory:
        found = system.memory()
        return MachineMemory(total_bytes=found.total_bytes, available_bytes=found.available_bytes)

    def prepare(self) -> None:
        """Nothing: the probes need little memory."""

    def speed(self) -> MachineSpeed:
        """Takes a quarter of a second."""
        threads, native = num_threads(), measure.native()
        reads = native.read_rates(256 << 20, threads, 5, 0.01)
        ops = native.multiply_rates("float32", threads, 5, 0.01)
        return MachineSpeed(median(rate for rate, _ in reads), median(rate for rate, _ in ops))

    def read_rates(self) -> dict[str, float]:
        """Made monotonic: a rate that rises with the working set was disturbed."""
        measured = {n: measure.read_bandwidth(n, num_threads()).per_s for n in BANDWIDTH_BYTES}
        rates: dict[str, float] = {}
        best = 0.0
        for size in sorted(measured, reverse=True):
            best = max(best, measured[size])
            rates[str(size)] = best
        return rates

    def peak_flops(self) -> dict[str, float]:
        peaks = measure.multiply_peaks(num_threads())
        return {kind: rate.per_s for kind, rate in peaks.items()}

    def kernel_ops_s(self, float32_ops_s: float) -> dict[str, float]:
        """Each is timed in alternation with float32 and given as that multiple of `float32_ops_s`,
        so that a disturbance cancels. Formats whose instructions cannot be timed on this CPU are
        left out.
        """
        module = measure.native()

        def rate(kind: str) -> float:
            rates = module.multiply_rates(kind, num_threads(), 3, 0.02)
            return float(median(rate for rate, _ in rates))

        known = measure.kinds_of(sorted(set(MULTIPLIED_AS.values())))
        ops_s = {}
        for name, kind in MULTIPLIED_AS.items():
            if module.linear_isa("auto") == "avxvnni" and kind.startswith("int"):
                continue  # there is no timing loop for its vpdpbusd
            if kind in known:
                ratio = median(rate(kind) / rate("float32") for _ in range(5))
                ops_s[name] = float32_ops_s * ratio
        return ops_s


class RatesOfGpu:
    """A CUDA device: a copy within its memory and its matrix products, measured once."""

    kind: Literal["cpu", "gpu"] = "gpu"

    def __init__(self, device: str) -> None:
        import torch

        self._device = device
        self.name = str(torch.cuda.get_device_name(device))

    @property
    def work_speed(self) -> float:
        return self._rates.bytes_s / TYPICAL_CORE_BYTES_S

    @cached_property
    def _rates(self) -> measure.GpuRates:
        return measure.gpu_rates(self._device)

    def memory(self) -> MachineMemory:
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return MachineMemory(total_bytes=total, available_bytes=free)

    def prepare(self) -> None:
        _ = self._rates

    def speed(self) -> MachineSpeed:
        return MachineSpeed(self._rates.bytes_s, self._rates.flops_s["float32"])

    def read_rates(self) -> dict[str, float]:
        return {str(self._rates.copy_bytes): self._rates.bytes_s}

    def peak_flops(self) -> dict[str, float]:
        return dict(self._rates.flops_s)

    def kernel_ops_s(self, float32_ops_s: float) -> dict[str, float]:
        known = self._rates.flops_s
        return {name: known[kind] for name, kind in MULTIPLIED_ON_GPU.items() if kind in known}


def rates_of(device: str) -> MachineRates:
    """The rates of the device that an engine runs on."""
    return RatesOfGpu(device) if device.startswith("cuda") else RatesOfCpu()


def num_threads() -> int:
    """Threads of the measurements: all cores that this process may use."""
    return max(1, int(system.cores().usable))
