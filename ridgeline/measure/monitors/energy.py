"""Energy of this machine's CPUs and GPUs during a run, from counters of the hardware.

CPUs: RAPL's package domains (/sys/class/powercap, Intel and AMD under Linux), which count the whole
package, other processes included, and wrap around at `max_energy_range_uj`. GPUs: NVML's energy
counter, and where a card has none, its mean power times the time. What cannot be read is None, with
the reason: virtual machines hide RAPL, and since 2020 only root may read it (CVE-2020-8694).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ridgeline.measure.monitors.gpu import GpuReading

POWERCAP = Path("/sys/class/powercap")
NOT_MEASURABLE = "not measurable here: "


class EnergyUse(msgspec.Struct, frozen=True, kw_only=True):
    """Joules during a run. `why_no_cpu`, `why_no_gpu`: why a figure is None."""

    cpu_j: float | None = None
    gpu_j: float | None = None
    why_no_cpu: str = ""
    why_no_gpu: str = ""

    @property
    def joules(self) -> float | None:
        """Of everything that could be measured; None if nothing could."""
        known = [value for value in (self.cpu_j, self.gpu_j) if value is not None]
        return sum(known) if known else None


class RaplDomain(msgspec.Struct, frozen=True):
    """One CPU package: its counter, and the value at which it wraps around, in microjoules."""

    counter: Path
    wraps_at: int

    def read(self) -> int:
        return int(self.counter.read_text())


class Rapl:
    """The energy counters of the CPU packages; `why_none`: the reason if there are none."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.why_none = ""
        self._domains = self._open(folder)

    def _open(self, folder: Path) -> list[RaplDomain]:
        zones = sorted(folder.glob("*rapl:*")) if folder.is_dir() else []
        packages = [zone for zone in zones if zone.name.count(":") == 1]
        if not packages:
            self.why_none = f"{NOT_MEASURABLE}no RAPL counters under {folder} (a virtual machine?)"
            return []
        try:
            domains = [
                RaplDomain(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
                for zone in packages
            ]
            for domain in domains:
                domain.read()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            self.why_none = f"{NOT_MEASURABLE}the RAPL counters cannot be read ({why})"
            return []
        return domains

    def read(self) -> tuple[int, ...]:
        """Microjoules by package; () if they cannot be read."""
        try:
            return tuple(domain.read() for domain in self._domains)
        except (OSError, ValueError):
            return ()

    def joules(self, readings: Sequence[tuple[int, ...]]) -> float | None:
        """Energy between the first and the last reading, over wrap-arounds; None if unknown."""
        complete = [reading for reading in readings if len(reading) == len(self._domains)]
        if not self._domains or len(complete) < 2:
            return None
        total = 0
        for index, domain in enumerate(self._domains):
            for before, after in pairwise(reading[index] for reading in complete):
                total += after - before if after >= before else after - before + domain.wraps_at
        return total / 1e6


def gpu_joules(
    readings: Sequence[tuple[GpuReading, ...]], times_s: Sequence[float]
) -> float | None:
    """Energy of all GPUs between the first and the last reading; None if one does not report it."""
    if len(readings) < 2 or not readings[0]:
        return None
    total = 0.0
    for card in zip(*readings, strict=True):
        used = _counted_j(card)
        used = _integrated_j(card, times_s) if used is None else used
        if used is None:
            return None
        total += used
    return total


def _counted_j(card: Sequence[GpuReading]) -> float | None:
    first, last = card[0].energy_j, card[-1].energy_j
    return None if first is None or last is None or last < first else last - first


def _integrated_j(card: Sequence[GpuReading], times_s: Sequence[float]) -> float | None:
    """Trapezoids of the power."""
    total = 0.0
    for (before, start_s), (after, end_s) in pairwise(zip(card, times_s, strict=True)):
        if before.power_w is None or after.power_w is None:
            return None
        total += (before.power_w + after.power_w) / 2 * (end_s - start_s)
    return total
