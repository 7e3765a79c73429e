"""What a run's server used of this machine: its processes' CPU and memory, and the GPUs.

Read beside /metrics while the run goes on, on a thread of their own: the client's event loop does
not wait for a driver. Nothing is guessed: what could not be read is a note with its reason.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from ridgeline.measure.monitors.gpu import GpuReading, Gpus, GpuUse, uses
from ridgeline.measure.monitors.polling import PERIOD_S, Polling
from ridgeline.measure.monitors.process_usage import ProcessReading, ProcessUse, read_tree, use_of


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """`process` None and no `gpus`: not measured, and `notes` say why."""

    process: ProcessUse | None = None
    gpus: tuple[GpuUse, ...] = ()
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, float]:
        """For the causes: of several GPUs, the mean of each figure that all of them tell. One that
        ran no kernel all along, while others did, is not the server's.
        """
        found: dict[str, float] = {}
        if self.process is not None:
            found["server_cpu_cores"] = self.process.cpu_cores
            if self.process.taken_share is not None:
                found["cpu_taken_share"] = self.process.taken_share
        used = [gpu for gpu in self.gpus if gpu.busy_share != 0] or self.gpus
        rows = [msgspec.structs.asdict(gpu) for gpu in used]
        for name in ("busy_share", "memory_busy_share", "clock_share", "slowed_share"):
            told = [row[name] for row in rows if row[name] is not None]
            if told and len(told) == len(rows):
                found[f"gpu_{name}"] = sum(told) / len(told)
        return found


class MachineWatch:
    """`async with` it around a run. `pid`: the root of the server's processes; None: not seen."""

    def __init__(
        self,
        pid: int | None,
        gpus: Gpus,
        *,
        why_no_process: str = "",
        period_s: float = PERIOD_S,
    ) -> None:
        self._pid, self._gpus, self._why = pid, gpus, why_no_process
        self._processes: list[ProcessReading] = []
        self._readings: list[tuple[GpuReading, ...]] = []
        self._polling = Polling(self._read, period_s)

    async def __aenter__(self) -> MachineWatch:
        await self._polling.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._polling.__aexit__(*exc)
        self._gpus.close()

    async def begin(self) -> None:
        """What was read until now belongs to the warm-up: forget it, and read anew."""
        self._processes.clear()
        self._readings.clear()
        await self._read()

    def report(self) -> MachineReport:
        notes = (self._why if self._pid is None else "", self._gpus.why_none)
        return MachineReport(
            process=use_of(self._processes),
            gpus=uses(self._readings),
            notes=tuple(filter(None, notes)),
        )

    async def _read(self) -> bool:
        await asyncio.to_thread(self._look)
        return bool(self._processes or self._readings)

    def _look(self) -> None:
        if self._pid is not None:
            reading = read_tree(self._pid, time.monotonic())
            if reading is not None:
                self._processes.append(reading)
        gpus = self._gpus.read()
        if gpus:
            self._readings.append(gpus)
