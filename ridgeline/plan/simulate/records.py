"""Records of a simulated fleet: its requests, its configuration, and the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter
from ridgeline.engine.scheduler.kv.cache_tiers import TierTotals
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.plan.calibration.interference import InterferenceSampler
from ridgeline.plan.simulate.answer_cache import AnswerCache
from ridgeline.plan.simulate.off_peak import OffPeak
from ridgeline.plan.simulate.replica import SimulatedReplica
from ridgeline.plan.simulate.shared_replica import SharedReplica
from ridgeline.plan.step_time.simulated import StepTimes
from ridgeline.records import Slo


class SimulatedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the load.

    `prefix` holds ids of the prompt's leading blocks of `prefix_block` tokens: equal ids stand for
    equal tokens, and tokens after them are unique to the request. `background`: a batch request.
    `not_before_s`: when it may be served at the earliest. `deadline_s`: of a request in a batch
    store, when it must have ended. `ttft_slo_s`: when its first token is due, for routers that heed
    it. `model`: which one it names, where replicas have several models.

    `pinned`: leading tokens that it pins in the prefix cache. `answer`: requests of equal keys get
    the same answer, where replicas store them. `answered`: a stored answer is there in any case;
    with a `question`, that of a similar question, which is found by embedding that many tokens.
    """

    at_s: float
    num_prompt: int
    num_output: int
    prefix: tuple[int, ...] = ()
    prefix_block: int = 512
    session: str = ""
    background: bool = False
    kind: str = ""
    not_before_s: float = 0.0
    deadline_s: float | None = None
    ttft_slo_s: float | None = None
    model: str = ""
    pinned: int = 0
    answer: int | None = None
    answered: bool = False
    question: int = 0


class LaneConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a replica: its name in requests, its schedulers, and how long its steps take."""

    model: str
    scheduler: Callable[[], Scheduler]
    step_times: StepTimes


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to make one kind of replica: its scheduler, and how long its steps take.

    `overhead_s` is the time of a request outside of steps, before its first token. `interference`
    makes the sampler of the replica with that number; None where no interference was measured.

    `num_stages` of a pipeline and `num_groups` of attention have a scheduler each (only one of the
    two can be above 1). `further`: other models on the same devices.
    """

    name: str
    scheduler: Callable[[], Scheduler]
    step_times: StepTimes
    num_devices: int = 1
    overhead_s: float = 0.0
    interference: Callable[[int], InterferenceSampler] | None = None
    model: str = ""
    num_stages: int = 1
    num_groups: int = 1
    further: tuple[LaneConfig, ...] = ()

    @property
    def models(self) -> frozenset[str]:
        """The models that its requests can name."""
        return frozenset((self.model, *(lane.model for lane in self.further)))


class Autoscaling(msgspec.Struct, frozen=True, kw_only=True):
    """Every `interval_s`, scale to the number of replicas that keeps `target` requests in flight on
    each, with what open batch requests need to end by their deadlines, and with more while a
    request has waited longer than `allowed_wait_s` for its first token.

    A new replica serves after `startup_s`; a surplus one drains and then stops, once none was
    wanted for `stable_s`.
    """

    target: float
    max_replicas: int
    min_replicas: int = 1
    interval_s: float = 15.0
    startup_s: float = 120.0
    stable_s: float = 0.0
    allowed_wait_s: float | None = None


class FaultModel(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas fail at random, every `mtbf_s` of service on average, and return after `repair_s`.

    Also models spot instances that are reclaimed. How long a replica serves until each of its
    failures depends on its number and the seed alone, so fleets that differ in something else, or
    are not simulated, can have the same failures.
    """

    mtbf_s: float
    repair_s: float = 120.0

    def lives_s(self, seed: int, number: int) -> Iterator[float]:
        """Seconds of service between the failures of the replica with that number."""
        rng = np.random.default_rng((seed, number))
        while True:
            yield float(rng.exponential(self.mtbf_s))


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. `replicas` has one entry per replica at the start; they may differ.

    With `decode` the fleet is disaggregated: those replicas decode, and `transfer_s` gives the
    seconds that the KV of a prompt of that many tokens travels. `check` is called after every
    commit, for tests of invariants. With `throttle` every replica refuses interactive requests
    while their p95 latencies violate that SLO. `slo`: of all interactive requests. `resume`:
    requests of a failed replica continue elsewhere behind the tokens that they have; else they
    start again. `off_peak`: when batch requests with a deadline may start. `answers`: makes the
    response cache of a replica.
    """

    replicas: tuple[ReplicaConfig, ...]
    router: str = "least-loaded"
    decode: tuple[ReplicaConfig, ...] = ()
    transfer_s: Callable[[int], float] | None = None
    scaling: Autoscaling | None = None
    faults: FaultModel | None = None
    seed: int = 0
    fast_forward: bool = True
    check: Callable[[Scheduler], None] | None = None
    throttle: Slo | None = None
    slo: Slo | None = None
    resume: bool = False
    off_peak: OffPeak | None = None
    answers: Callable[[], AnswerCache] | None = None


@dataclass(slots=True)
class RequestOutcome:
    """What happened to one request; times on the virtual clock (nan: never).

    `num_resumed`: output tokens of failed replicas behind which others continued. `answered`: by a
    response cache.
    """

    request: SimulatedRequest
    started_s: float = math.nan
    first_s: float = math.nan
    finished_s: float = math.nan
    cached: int = 0
    replica: int = -1
    num_restarts: int = 0
    num_resumed: int = 0
    num_preempted: int = 0
    error: str = ""
    answered: bool = False


@dataclass(slots=True, eq=False)
class FleetReplica:
    """One replica of the fleet, from the time it is paid for until it stops."""

    id: int
    config: ReplicaConfig
    simulated: SimulatedReplica | SharedReplica
    pool: int
    from_s: float
    until_s: float = math.inf
    up: bool = False
    draining: bool = False
    num_busy_s: float = 0.0
    num_steps: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    sent_s: dict[str, float] = field(default_factory=dict)  # until the first token
    limiter: QueueLimiter | None = None
    answers: AnswerCache | None = None

    @property
    def num_slots(self) -> int:
        """Requests of its first model that it serves at once."""
        count = max(self.config.num_stages, self.config.num_groups)
        return count * self.simulated.schedulers[0].limits.max_num_seqs


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation.

    `area` is the integral of requests in flight over time (request·s). `num_replicas` lists (time,
    replicas in service) at each change. `tiers`: what all replicas loaded from tiers of their KV
    caches.
    """

    requests: tuple[RequestOutcome, ...]
    replicas: tuple[FleetReplica, ...]
    duration_s: float
    area: float
    num_steps: int
    num_events: int
    num_replicas: tuple[tuple[float, int], ...]
    tiers: TierTotals = msgspec.field(default_factory=TierTotals)
