"""What the user requested, and a configuration that is up."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.optimize.comparison.objective import JudgedRun, Objective
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.environment import Deployment
from ridgeline.records import Slo


class OptimizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One optimisation request.

    `settings`: the baseline, from which the search starts. `defaults`: a rival that is tried before
    any rung, the performance settings of the product or of the server as shipped; None if there is
    none, or the baseline has the same. `shared_machine`: runs count although other work took the
    CPU.
    """

    settings: Settings
    workload: str
    slo: Slo
    objective: Objective
    budget_s: float
    price: MachinePrice
    seed: int = 0
    defaults: Settings | None = None
    shared_machine: bool = False


class RunningConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that is up. `stack` closes it; `rate` is its best load so far, in requests/s.

    `settled`: that load comes from a staircase rather than from the coarse initial search.
    """

    label: str
    settings: Settings
    deployment: Deployment
    stack: ExitStack
    rate: float
    runs: tuple[JudgedRun, ...]
    settled: bool = False
