"""Check whether this machine can run Ridgeline, and run it well."""

from __future__ import annotations

from ridgeline.hardware.doctor import Check, diagnose
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
    checks = tuple(diagnose(refresh=refresh))
    return MachineReadiness(
        ready=all(check.ok for check in checks if check.required), checks=checks
    )
