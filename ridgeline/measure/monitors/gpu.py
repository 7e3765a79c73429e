"""GPUs of this machine through NVML: readings during a run, and their summary.

NVML (nvidia-ml-py, the extra `nvml`) is only imported when GPUs are opened. Without it or without a
driver, there are no GPUs and a reason. A figure that a GPU does not support is None, never 0.

  busy_share         share of the driver's last sample period (up to 1 s) with a running kernel. One
                     block on one SM counts as busy: it reveals an idle device, not a full one.
  memory_busy_share  share of it in which device memory was read or written; not GB/s
  clock_share        SM clock over its maximum; `slowed_by` has the reasons other than idleness
  is_divided         MIG is on: memory, power and energy are of the whole card, and the driver
                     reports no utilisation
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
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
    """Figures of one GPU. Shares are in [0, 1]; None: not reported. `number`: the driver's."""

    name: str
    number: int = 0
    is_divided: bool = False
    busy_share: float | None = None
    memory_busy_share: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_share: float | None = None


class GpuReading(GpuFigures, frozen=True, kw_only=True):
    """One GPU at one time. `energy_j`: since the driver was loaded."""

    slowed_by: tuple[str, ...] | None = None
    energy_j: float | None = None


class GpuUsage(GpuFigures, frozen=True, kw_only=True):
    """One GPU over a run: means of its readings.

    `slowed_share`: share of readings in which it was slowed down, and `slowed_by`: by reason.
    """

    num_readings: int
    slowed_share: float | None = None
    slowed_by: dict[str, float] = {}


class Gpus(Protocol):
    """GPUs that can be read. `why_none`: why there are none, or fewer than the machine has."""

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
    """The GPUs of this machine that may be read. `nvml` is the initialised module."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[int, Any] = {}
        unreadable = []
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                self._handles[number] = nvml.nvmlDeviceGetHandleByIndex(number)
            except nvml.NVMLError as error:  # a container has the others
                unreadable.append(f"GPU {number}: {error}")
        self.why_none = f"NVML cannot read {'; '.join(unreadable)}" if unreadable else ""
        if not self._handles:
            self.why_none = self.why_none or "NVML finds no GPU"

    def read(self) -> tuple[GpuReading, ...]:
        return tuple(self._read_one(*card) for card in self._handles.items())

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _read_one(self, number: int, handle: Any) -> GpuReading:
        query = partial(self._query, handle)
        clock_of = getattr(self._nvml, "NVML_CLOCK_SM", 1)
        used, memory = query("UtilizationRates"), query("MemoryInfo")
        clock, highest = query("ClockInfo", clock_of), query("MaxClockInfo", clock_of)
        mode = query("MigMode")
        return GpuReading(
            name=_text(query("Name")),
            number=number,
            is_divided=mode is not None and mode[0] == 1,
            busy_share=None if used is None else used.gpu / 100,
            memory_busy_share=None if used is None else used.memory / 100,
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_total_bytes=None if memory is None else float(memory.total),
            power_w=_thousandth(query("PowerUsage")),
            power_limit_w=_thousandth(query("EnforcedPowerLimit")),
            clock_share=None if clock is None or not highest else clock / highest,
            slowed_by=_reasons(self._clock_events(handle)),
            energy_j=_thousandth(query("TotalEnergyConsumption")),
        )

    def _clock_events(self, handle: Any) -> int | None:
        """Bit mask of clock events.

        Renamed in driver 535: old versions of the module and old drivers only know the old name.
        """
        mask: int | None = self._query(handle, "CurrentClocksEventReasons")
        if mask is None:
            mask = self._query(handle, "CurrentClocksThrottleReasons")
        return mask

    def _query(self, handle: Any, name: str, *args: Any) -> Any:
        """Call `nvmlDeviceGetNAME`; None if this GPU, driver or module does not support it."""
        function = getattr(self._nvml, f"nvmlDeviceGet{name}", None)
        try:
            return None if function is None else function(handle, *args)
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
    except pynvml.NVMLError as error:
        return NoGpus(f"NVML is not available: {error}")
    try:
        return NvmlGpus(pynvml)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return NoGpus(f"NVML cannot count GPUs: {error}")


def gpu_usages(readings: Iterable[Sequence[GpuReading]]) -> tuple[GpuUsage, ...]:
    """Usage of every GPU over all readings, in the driver's order."""
    return tuple(_usage(of_one) for of_one in zip(*(row for row in readings if row), strict=True))


def _usage(readings: Sequence[GpuReading]) -> GpuUsage:
    means = {name: _mean(getattr(reading, name) for reading in readings) for name in MEANS}
    known = [reading.slowed_by for reading in readings if reading.slowed_by is not None]
    reasons = Counter(reason for slowed_by in known for reason in slowed_by)
    first, last = readings[0], readings[-1]  # of a card that is lost meanwhile, nothing is known
    return GpuUsage(
        name=first.name,
        number=first.number,
        is_divided=first.is_divided,
        num_readings=len(readings),
        memory_total_bytes=first.memory_total_bytes,
        power_limit_w=last.power_limit_w,
        slowed_share=_mean(float(bool(slowed_by)) for slowed_by in known),
        slowed_by={reason: times / len(known) for reason, times in reasons.most_common()},
        **means,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _reasons(mask: int | None) -> tuple[str, ...] | None:
    return None if mask is None else tuple(text for bit, text in SLOWED_BY.items() if mask & bit)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "GPU")
