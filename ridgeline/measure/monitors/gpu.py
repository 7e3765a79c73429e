"""The GPUs of this machine through NVML: read during a run, and summed up.

NVML (nvidia-ml-py, the extra `nvml`) is imported here alone, when somebody looks. Without it, or
without a driver, there are no GPUs and a reason why: nothing is reported as measured. A figure that
a GPU does not support is None, never 0.

What NVML's figures are:
  busy_share         the part of the driver's last sample period (up to 1 s) with a kernel running.
                     One block on one SM counts as busy: it shows an idle device, not a full one.
  memory_busy_share  the part of it in which device memory was read or written. Not GB/s: see MBU.
  clock_share        SM clock over its highest; `slowed_by` says why it is lower, idleness apart.
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
"""NVML's clock event reasons that take speed away; the others are settings and idleness."""

MEANS = ("busy_share", "memory_busy_share", "memory_used_bytes", "power_w", "clock_share")


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one GPU. Shares are 0..1; None: it does not tell."""

    name: str
    busy_share: float | None = None
    memory_busy_share: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_share: float | None = None


class GpuReading(GpuFigures, frozen=True, kw_only=True):
    """One GPU at one instant."""

    slowed_by: tuple[str, ...] = ()


class GpuUse(GpuFigures, frozen=True, kw_only=True):
    """One GPU over a run: means of its readings, and the part of them in which it was slowed.

    `slowed_by`: each reason with the part of the readings that named it.
    """

    num_readings: int
    slowed_share: float = 0.0
    slowed_by: dict[str, float] = {}


class Gpus(Protocol):
    """The GPUs that can be read; `why_none` says why there are none ("" where there are)."""

    why_none: str

    def read(self) -> tuple[GpuReading, ...]: ...

    def close(self) -> None: ...


class NoGpus:
    """Nothing to read, and why."""

    def __init__(self, why: str) -> None:
        self.why_none = why

    def read(self) -> tuple[GpuReading, ...]:
        return ()

    def close(self) -> None:
        return None


class NvmlGpus:
    """All GPUs of this machine. `nvml` is the module, initialised."""

    why_none = ""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(map(self._one, self._handles))

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _one(self, handle: Any) -> GpuReading:
        nvml, told = self._nvml, self._told
        used = told(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
        clock = told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        highest = told(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        return GpuReading(
            name=_text(told(nvml.nvmlDeviceGetName, handle)),
            busy_share=None if used is None else used.gpu / 100,
            memory_busy_share=None if used is None else used.memory / 100,
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_total_bytes=None if memory is None else float(memory.total),
            power_w=_thousandth(told(nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(told(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            clock_share=None if clock is None or not highest else clock / highest,
            slowed_by=_reasons(told(self._clock_events, handle)),
        )

    def _clock_events(self, handle: Any) -> int:
        """Renamed with driver 535: old copies of the module know the old name alone, and old
        drivers answer to no other.
        """
        nvml = self._nvml
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        told = None if ask is None else self._told(ask, handle)
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) if told is None else told)

    def _told(self, ask: Callable[..., Any], *args: Any) -> Any:
        """None where this GPU or driver does not tell it."""
        try:
            return ask(*args)
        except self._nvml.NVMLError:
            return None


def open_gpus() -> Gpus:
    """The GPUs of this machine, or `NoGpus` with the reason."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return NoGpus("no NVML: pip install 'ridgeline[nvml]' where there is an NVIDIA GPU")
    try:
        pynvml.nvmlInit()
        gpus = NvmlGpus(pynvml)
    except pynvml.NVMLError as error:
        return NoGpus(f"no NVML: {error}")
    return gpus


def uses(readings: Iterable[Sequence[GpuReading]]) -> tuple[GpuUse, ...]:
    """One row per GPU over all readings, in the driver's order."""
    return tuple(_use(of_one) for of_one in zip(*(row for row in readings if row), strict=True))


def _use(readings: Sequence[GpuReading]) -> GpuUse:
    means = {name: _mean(getattr(each, name) for each in readings) for name in MEANS}
    named = Counter(reason for each in readings for reason in each.slowed_by)
    last, count = readings[-1], len(readings)
    return GpuUse(
        name=last.name,
        num_readings=count,
        memory_total_bytes=last.memory_total_bytes,
        power_limit_w=last.power_limit_w,
        slowed_share=sum(bool(each.slowed_by) for each in readings) / count,
        slowed_by={reason: times / count for reason, times in named.most_common()},
        **means,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return fmean(told) if told else None


def _reasons(mask: int | None) -> tuple[str, ...]:
    return tuple(text for bit, text in SLOWED_BY.items() if mask is not None and mask & bit)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "GPU")
