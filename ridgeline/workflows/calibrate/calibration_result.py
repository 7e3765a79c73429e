"""The record of a calibration, of this machine or of a server."""

from __future__ import annotations

from typing import Any

from ridgeline.plan.calibration.calibration import Calibration
from ridgeline.plan.calibration.remote_server import ServerTimes
from ridgeline.report.json_line import plain
from ridgeline.report.result import Result


class CalibrationResult(Result, frozen=True, kw_only=True):
    """A calibration, to be saved as JSON and given to the planning functions.

    `machine`: of the engine on this machine; `server`: of a server, from outside. One of them is
    None.
    """

    machine: Calibration | None = None
    server: ServerTimes | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(plain(self.machine or self.server))
