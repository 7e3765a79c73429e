"""Check whether this machine can run Ridgeline, and run it well."""

from __future__ import annotations

from pathlib import Path

from ridgeline.hardware.doctor import Check, diagnose
from ridgeline.measure.monitors.gpu import GpuReading, open_gpus
from ridgeline.report.result import Result


class MachineReadiness(Result, frozen=True, kw_only=True):
    """`ready`: whether every required check passed."""

    ready: bool
    checks: tuple[Check, ...]

    @property
    def num_failed(self) -> int:
        return sum(not check.ok for check in self.checks)


def check_machine(*, refresh: bool = False) -> MachineReadiness:
    """Run every check. `refresh`: probe the machine again, even if there is a recent record."""
    checks = (*diagnose(refresh=refresh), *check_counters())
    return MachineReadiness(
        ready=all(check.ok for check in checks if check.required), checks=checks
    )


def check_counters() -> tuple[Check, ...]:
    """What NVML reads of the GPUs, for `bench` and `diagnose`; () on a machine without one."""
    gpus = open_gpus()
    try:
        readings = gpus.read()
    finally:
        gpus.close()
    has_card = any(Path("/dev").glob("nvidia[0-9]*"))
    if not readings and not has_card:
        return ()
    return (
        Check(
            ok=bool(readings),  # a container may read some of the machine's cards
            title="GPU counters",
            detail="; ".join([*map(_figures, readings), *filter(None, (gpus.why_none,))]),
            remedy="" if readings else "without them, bench and diagnose do not see the GPU",
        ),
    )


def _figures(gpu: GpuReading) -> str:
    """`GPU 0: NVIDIA H100, 20 of 80 GB used, 350 of 700 W, clock 71%`, of what it reports."""
    words = [f"GPU {gpu.number}: {gpu.name}"]
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes is not None:
        used, total = gpu.memory_used_bytes / 1e9, gpu.memory_total_bytes / 1e9
        words.append(f"{used:.0f} of {total:.0f} GB used")
    if gpu.power_w is not None:
        limit = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        words.append(f"{gpu.power_w:.0f}{limit} W")
    if gpu.clock_share is not None:
        words.append(f"clock {gpu.clock_share:.0%}")
    if gpu.slowed_by:
        words.append(f"slowed down by {', '.join(gpu.slowed_by)}")
    if gpu.is_divided:
        words.append("MIG is on: figures of the whole card")
    return ", ".join(words)
