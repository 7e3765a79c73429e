"""GPUs of this machine through NVML: readings during a run, and their summary.

NVML (nvidia-ml-py, the extra `nvml`) is only imported when GPUs are opened. Without it or without a
driver, there are no GPUs and a reason. A figure that a GPU does not support is None, never 0.

  busy_share         share of the driver's last sample period (up to 1 s) with a running kernel. One
                     block on one SM counts as busy: it reveals an idle device, not a full one.
  memory_busy_share  share of it in which device memory was read or written; not GB/s
  clock_share        SM clock over its maximum; `slowed_by` has the reasons other than idleness
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Protocol

import msgspec

SLOWED_BY = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clock event reasons that reduce speed; the others are settings and idleness."""

MEANS = ("busy_share", "memory_busy_share", "memory_used_bytes", "power_w", "clock_share")


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU. Shares are in [0, 1]; None: not reported."""

    name: str
    busy_share: float | None = None
    memory_busy_share: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_share: float | None = None


class GpuReading(GpuFigures, frozen=True, kw_only=True):
    """One GPU at one time. `energy_j`: since the driver was loaded."""

    slowed_by: tuple[str, ...] = ()
    energy_j: float | None = None


class GpuUsage(GpuFigures, frozen=True, kw_only=True):
    """One GPU over a run: means of its readings.

    `slowed_share`: share of readings in which it was slowed down, and `slowed_by`: by reason.
    """

    num_readings: int
    slowed_share: float = 0.0
    slowed_by: dict[str, float] = {}


class Gpus(Protocol):
    """GPUs that can be read. `why_none`: the reason if there are none, else ""."""

    why_none: str

    def read(self) -> tuple[GpuReading, ...]: ...

    def close(self) -> None: ...


class NoGpus:
    """No GPUs, and the reason."""

    def __init__(self, why: str) -> None:
        self.why_none = why

    def read(self) -> tuple[GpuReading, ...]:
        return ()

    def close(self) -> None:
        return None


class NvmlGpus:
    """All GPUs of this machine. `nvml` is the initialised module."""

    why_none = ""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(map(self._read_one, self._handles))

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _read_one(self, handle: Any) -> GpuReading:
        nvml, query = self._nvml, self._query
        used = query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        clock = query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        highest = query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        return GpuReading(
            name=_text(query(nvml.nvmlDeviceGetName, handle)),
            busy_share=None if used is None else used.gpu / 100,
            memory_busy_share=None if used is None else used.memory / 100,
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_total_bytes=None if memory is None else float(memory.total),
            power_w=_thousandth(query(nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            clock_share=None if clock is None or not highest else clock / highest,
            slowed_by=_reasons(query(self._clock_events, handle)),
            energy_j=_thousandth(query(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)),
        )

    def _clock_events(self, handle: Any) -> int:
        """Bit mask of clock events.

        Renamed in driver 535: old versions of the module and old drivers only know the old name.
        """
        nvml = self._nvml
        current = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = None if current is None else self._query(current, handle)
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) if mask is None else mask)

    def _query(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call an NVML function; None if this GPU or driver does not support it."""
        try:
            return function(*args)
        except self._nvml.NVMLError:
            return None


def open_gpus() -> Gpus:
    """The GPUs of this machine, or `NoGpus` with the reason."""
    try:
        import pynvml
    except ImportError:
        return NoGpus(
            "NVML is not installed: pip install 'ridgeline[nvml]' on machines with an NVIDIA GPU"
        )
    try:
        pynvml.nvmlInit()
        gpus = NvmlGpus(pynvml)
    except pynvml.NVMLError as error:
        return NoGpus(f"NVML is not available: {error}")
    return gpus


def gpu_usages(readings: Iterable[Sequence[GpuReading]]) -> tuple[GpuUsage, ...]:
    """Usage of every GPU over all readings, in the driver's order."""
    return tuple(_usage(of_one) for of_one in zip(*(row for row in readings if row), strict=True))


def _usage(readings: Sequence[GpuReading]) -> GpuUsage:
    means = {name: _mean(getattr(reading, name) for reading in readings) for name in MEANS}
    reasons = Counter(reason for reading in readings for reason in reading.slowed_by)
    last, count = readings[-1], len(readings)
    return GpuUsage(
        name=last.name,
        num_readings=count,
        memory_total_bytes=last.memory_total_bytes,
        power_limit_w=last.power_limit_w,
        slowed_share=sum(bool(reading.slowed_by) for reading in readings) / count,
        slowed_by={reason: times / count for reason, times in reasons.most_common()},
        **means,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _reasons(mask: int | None) -> tuple[str, ...]:
    return tuple(text for bit, text in SLOWED_BY.items() if mask is not None and mask & bit)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "GPU")
