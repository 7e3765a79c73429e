"""Energy: counters that wrap around, cards without a counter, and machines that show nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ridgeline.measure.monitors.energy import EnergyUse, Rapl, gpu_joules
from ridgeline.measure.monitors.gpu import GpuReading
from ridgeline.measure.monitors.machine_monitor import MachineMonitor, MachineReport
from ridgeline.workflows.bench.observed_tables import machine_rows


def rapl_folder(tmp_path: Path, *microjoules: int) -> Path:
    """Packages with a domain of their cores below the first, which must not count twice."""
    for number, energy in enumerate(microjoules):
        for name in (f"intel-rapl:{number}", f"intel-rapl:{number}:0"):
            zone = tmp_path / name
            zone.mkdir(exist_ok=True)
            (zone / "energy_uj").write_text(f"{energy}\n")
            (zone / "max_energy_range_uj").write_text("1000000000\n")
    return tmp_path


def test_packages_are_summed_over_a_wrap_around(tmp_path: Path) -> None:
    rapl = Rapl(rapl_folder(tmp_path, 999_000_000, 5_000_000))
    first = rapl.read()
    rapl_folder(tmp_path, 4_000_000, 6_500_000)
    readings = [first, rapl.read()]
    assert rapl.why_none == ""
    assert rapl.joules(readings) == pytest.approx(5.0 + 1.5)
    assert rapl.joules(readings[:1]) is None


def test_machine_without_counters_says_why(tmp_path: Path) -> None:
    rapl = Rapl(tmp_path / "none")
    assert rapl.joules([rapl.read(), rapl.read()]) is None
    assert rapl.why_none.startswith("not measurable here: no RAPL counters")
    zone = rapl_folder(tmp_path, 1) / "intel-rapl:0"
    (zone / "energy_uj").unlink()
    assert "cannot be read (No such file or directory)" in Rapl(tmp_path).why_none


def test_gpu_energy_is_counted_or_integrated_from_power() -> None:
    def reading(energy_j: float | None, power_w: float | None) -> GpuReading:
        return GpuReading(name="a card", energy_j=energy_j, power_w=power_w)

    counted = [(reading(100.0, 300.0),), (reading(450.0, 300.0),)]
    assert gpu_joules(counted, [0.0, 1.0]) == 350.0
    by_power = [(reading(None, 100.0),), (reading(None, 300.0),), (reading(None, 300.0),)]
    assert gpu_joules(by_power, [0.0, 1.0, 3.0]) == pytest.approx(200 + 600)
    assert gpu_joules([(reading(None, None),)] * 2, [0.0, 1.0]) is None
    assert gpu_joules([], []) is None


@pytest.mark.parametrize(
    ("cards", "num_readings", "why"),
    [
        ((GpuReading(name="card 1", number=1),), 2, "a card reports neither energy nor power"),
        ((GpuReading(name="card 1", number=1, energy_j=5.0),), 1, "the run was too short"),
        ((), 2, "NVML cannot read GPU 0: denied"),
    ],
)
def test_reason_for_missing_energy_is_that_of_the_cards_that_were_read(
    cards: tuple[GpuReading, ...], num_readings: int, why: str, tmp_path: Path
) -> None:
    """A card that cannot be read was the reason for what another did not report."""

    class Cards:
        why_none = "NVML cannot read GPU 0: denied"

        def read(self) -> tuple[GpuReading, ...]:
            return cards

        def close(self) -> None:
            return None

    async def run() -> MachineReport:
        monitor = MachineMonitor(None, Cards(), rapl=Rapl(tmp_path / "none"), period_s=3600)
        for _ in range(num_readings):
            await monitor._read()
        return monitor.report()

    energy = asyncio.run(run()).energy
    assert energy is not None and energy.gpu_j is None and energy.why_no_gpu.endswith(why)


def test_report_has_joules_per_token_or_the_reason() -> None:
    used = EnergyUse(cpu_j=120.0, gpu_j=None, why_no_gpu="no card")
    assert used.joules == 120.0
    measured = MachineReport(energy=used)
    rows = {row[0]: row for row in machine_rows(measured, in_process=True, num_tokens=60)}
    assert rows["CPU energy"][1:] == (
        "120",
        "J: 2 J per output token; whole packages, other processes included (RAPL)",
    )
    nothing = EnergyUse(why_no_cpu="not measurable here: no counters")
    assert nothing.joules is None
    (row,) = machine_rows(MachineReport(energy=nothing), in_process=True)
    assert row == ("CPU energy", "–", "not measurable here: no counters")
