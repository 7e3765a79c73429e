"""What a simulated fleet is made of, what it is asked, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.plan.calibration.interference import InterferenceSampler
from ridgeline.plan.simulate.replica import SimulatedReplica
from ridgeline.plan.step_time.simulated import StepTimes


class SimulatedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One arrival. `prefix`: ids of the prompt's leading blocks of `prefix_block` tokens; equal ids
    are equal tokens. What is beyond them is the request's own. `background`: a line of a batch, in
    the engine's lane for those. `not_before_s`: held back until then."""

    at_s: float
    num_prompt: int
    num_output: int
    prefix: tuple[int, ...] = ()
    prefix_block: int = 512
    session: str = ""
    background: bool = False
    kind: str = ""
    not_before_s: float = 0.0


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to make one kind of replica: a fresh scheduler, and what its steps cost. `asking_s`: what
    a request takes on its way in and out besides its steps. `sky`: of its replica of that
    number, where the weather of the machine is known."""

    name: str
    scheduler: Callable[[], Scheduler]
    pace: StepTimes
    num_devices: int = 1
    asking_s: float = 0.0
    sky: Callable[[int], InterferenceSampler] | None = None


class Autoscaling(msgspec.Struct, frozen=True, kw_only=True):
    """Every `interval_s`: as many replicas as keep `target` requests in flight on each; a new one
    serves after `startup_s`, one too many takes no more requests and goes when it is empty."""

    target: float
    most: int
    least: int = 1
    interval_s: float = 15.0
    startup_s: float = 120.0


class FaultModel(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas fail at random, on average every `mtbf_s` of service, and are back after `repair_s`.

    A spot instance that is taken away is the same thing with another name.
    """

    mtbf_s: float
    repair_s: float = 120.0


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. `builds`: one entry per replica at the start (they may differ).

    `decode`: replicas of a second pool; `transfer_s(prompt tokens)`: seconds of the KV's way there.
    """

    builds: tuple[ReplicaConfig, ...]
    router: str = "least-loaded"
    decode: tuple[ReplicaConfig, ...] = ()
    transfer_s: Callable[[int], float] | None = None
    scaling: Autoscaling | None = None
    faults: FaultModel | None = None
    seed: int = 0
    leaps: bool = True
    check: Callable[[Scheduler], None] | None = None


@dataclass(slots=True)
class RequestOutcome:
    """What became of one request; instants on the virtual clock (nan: never)."""

    request: SimulatedRequest
    started_s: float = math.nan
    first_s: float = math.nan
    finished_s: float = math.nan
    cached: int = 0
    replica: int = -1
    num_restarts: int = 0
    num_preempted: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class FleetReplica:
    """One replica of the fleet, for as long as it is paid for."""

    id: int
    build: ReplicaConfig
    station: SimulatedReplica
    pool: int
    from_s: float
    until_s: float = math.inf
    up: bool = False
    draining: bool = False
    num_busy_s: float = 0.0
    num_steps: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happened. `area`: integral of the requests in flight over time (request·s).

    `num_replicas`: (instant, replicas in service) at each change.
    """

    lives: tuple[RequestOutcome, ...]
    members: tuple[FleetReplica, ...]
    duration_s: float
    area: float
    num_steps: int
    num_events: int
    num_replicas: tuple[tuple[float, int], ...]
