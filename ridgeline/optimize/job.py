"""What was asked of a climb, and a configuration that is up."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.optimize.comparison.objective import JudgedRun, Objective
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.environment import Deployment
from ridgeline.records import Slo


class OptimizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. `settings` is what every rung starts from (model, dtype, limits)."""

    settings: Settings
    workload: str
    slo: Slo
    objective: Objective
    budget_s: float
    price: MachinePrice
    seed: int = 0


class RunningConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that is up. `stack` closes it; `rate` is its best load so far.

    `settled`: that load comes from a staircase, not from a search in wide steps.
    """

    label: str
    settings: Settings
    deployment: Deployment
    stack: ExitStack
    rate: float
    readings: tuple[JudgedRun, ...]
    settled: bool = False
