"""How many replicas a fleet needs: one law for the simulator and for the gateway's metric.

    demand       requests in flight / those that one replica serves within its SLO
    queue        the oldest request has waited longer than it may: replicas x age / allowed wait,
                 at most double
    batch        replicas that the open batch requests need to end by their deadlines
    up           at once
    down         to the most that was wanted within the stable window, which is no shorter than a
                 replica takes to start: what is stopped would have to be started again
    no signals   nothing changes, and never below the floor

An SLO that is missed although nothing waits buys no replicas: more of them would not be faster.
No clock: instants are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`target_in_flight`: requests that one replica serves within its SLO; `allowed_wait_s`: how
    long a request may wait for its first token (None: the queue is not watched)."""

    target_in_flight: float
    min_replicas: int = 1
    max_replicas: int = 1000
    allowed_wait_s: float | None = None
    stable_s: float = 300.0


class FleetSignals(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a fleet now. `batch_demand`: replicas, in fractions, that the open batch
    requests need to end by their deadlines."""

    in_flight: int
    num_replicas: int
    queue_age_s: float = 0.0
    batch_demand: float = 0.0


class Autoscaler:
    """Decides from one look at the fleet to the next."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._wanted: deque[tuple[float, int]] = deque()
        self._last = policy.min_replicas

    def decide(self, signals: FleetSignals | None, now_s: float) -> int:
        """The number of replicas wanted now; `signals` None: the metrics are gone."""
        policy = self._policy
        if signals is not None:
            self._remember(now_s, self._demand(signals))
            self._last = max(wanted for _, wanted in self._wanted)
        return min(policy.max_replicas, max(policy.min_replicas, self._last))

    def _demand(self, signals: FleetSignals) -> int:
        policy = self._policy
        wanted = math.ceil(signals.in_flight / policy.target_in_flight + signals.batch_demand)
        if policy.allowed_wait_s is not None and signals.queue_age_s > policy.allowed_wait_s:
            growth = min(2.0, signals.queue_age_s / policy.allowed_wait_s)
            wanted = max(wanted, math.ceil(signals.num_replicas * growth))
        return wanted

    def _remember(self, now_s: float, wanted: int) -> None:
        """Keep what was wanted within the stable window, in descending order."""
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - self._policy.stable_s:
            self._wanted.popleft()
