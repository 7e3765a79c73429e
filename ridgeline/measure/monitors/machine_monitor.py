"""Use of this machine during a run: CPU and memory of the server's processes, and the GPUs.

Readings are taken in a separate thread, so that the client's event loop does not wait for a driver.
Figures that could not be read are missing, with the reason as a note.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from ridgeline.measure.monitors.energy import NOT_MEASURABLE, EnergyUse, Rapl, gpu_joules
from ridgeline.measure.monitors.gpu import GpuReading, Gpus, GpuUsage, gpu_usages
from ridgeline.measure.monitors.polling import PERIOD_S, Polling
from ridgeline.measure.monitors.process_usage import (
    ProcessReading,
    ProcessUsage,
    process_usage,
    read_tree,
)


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Usage during a run. `notes`: why `process` or `gpus` are missing.

    `energy`: None if the server is not on this machine.
    """

    process: ProcessUsage | None = None
    gpus: tuple[GpuUsage, ...] = ()
    energy: EnergyUse | None = None
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, float]:
        """Facts for the diagnosis: means over the GPUs of the figures that all of them report.

        A GPU that never ran a kernel does not belong to the server.
        """
        facts: dict[str, float] = {}
        if self.process is not None:
            facts["server_cpu_cores"] = self.process.cpu_cores
            if self.process.taken_share is not None:
                facts["cpu_taken_share"] = self.process.taken_share
        used = [gpu for gpu in self.gpus if gpu.busy_share != 0]
        rows = [msgspec.structs.asdict(gpu) for gpu in used]
        for name in ("busy_share", "memory_busy_share", "clock_share", "slowed_share"):
            known = [row[name] for row in rows if row[name] is not None]
            if known and len(known) == len(rows):
                facts[f"gpu_{name}"] = sum(known) / len(known)
        return facts


class MachineMonitor:
    """Reads the machine while an `async with` block runs.

    `pid`: the root of the server's processes; None: unknown, for the reason `why_no_process`.
    `rapl`: None if this machine's energy is not the server's.
    """

    def __init__(
        self,
        pid: int | None,
        gpus: Gpus,
        *,
        why_no_process: str = "",
        rapl: Rapl | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._pid, self._gpus, self._why = pid, gpus, why_no_process
        self._processes: list[ProcessReading] = []
        self._readings: list[tuple[GpuReading, ...]] = []
        self._times_s: list[float] = []
        self._rapl, self._cpu_readings = rapl, list[tuple[int, ...]]()
        self._polling = Polling(self._read, period_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """The root of the observed processes, if it is known."""
        return () if self._pid is None else (self._pid,)

    async def __aenter__(self) -> MachineMonitor:
        await self._polling.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._polling.__aexit__(*exc)
        self._gpus.close()

    async def begin(self) -> None:
        """Discard the readings of the warm-up and start again."""
        self._processes.clear()
        self._readings.clear()
        self._times_s.clear()
        self._cpu_readings.clear()
        await self._read()

    def report(self) -> MachineReport:
        notes = (self._why if self._pid is None else "", self._gpus.why_none)
        return MachineReport(
            process=process_usage(self._processes),
            gpus=gpu_usages(self._readings),
            energy=self._energy(),
            notes=tuple(filter(None, notes)),
        )

    def _energy(self) -> EnergyUse | None:
        if self._rapl is None:
            return None
        cpu_j, gpu_j = (
            self._rapl.joules(self._cpu_readings),
            gpu_joules(self._readings, self._times_s),
        )
        too_short = f"{NOT_MEASURABLE}the run was too short"
        why_cpu = self._rapl.why_none or too_short
        why_gpu = too_short
        if not self._readings:
            why_gpu = self._gpus.why_none or too_short
        elif len(self._readings) > 1:
            why_gpu = f"{NOT_MEASURABLE}a card reports neither energy nor power"
        return EnergyUse(
            cpu_j=cpu_j,
            gpu_j=gpu_j,
            why_no_cpu="" if cpu_j is not None else why_cpu,
            why_no_gpu="" if gpu_j is not None else why_gpu,
        )

    async def _read(self) -> bool:
        await asyncio.to_thread(self._read_now)
        return bool(self._processes or self._readings)

    def _read_now(self) -> None:
        if self._pid is not None:
            reading = read_tree(self._pid, time.monotonic())
            if reading is not None:
                self._processes.append(reading)
        gpus = self._gpus.read()
        if gpus:
            self._readings.append(gpus)
            self._times_s.append(time.monotonic())
        if self._rapl is not None:
            self._cpu_readings.append(self._rapl.read())
