"""A fleet on a virtual clock: arrivals, a router, replicas with the engine's own scheduler.

    requests ─▶ router ─▶ station (scheduler, blocks, prefix cache; steps from a model) ─▶ lives
                  ▲            │
                  └── autoscaler, failures (what was in flight begins again elsewhere)

Everything that happens is an instant in one heap, ties broken by order of entry, so that a seed
determines every number. Between two instants nothing is looked at: a replica whose sequences only
decode costs nothing until one of them ends or a request comes (`ridgeline.plan.simulate.replica`).

With a `decode` pool the fleet is disaggregated: a prompt is computed in the first pool, its KV
travels, and the answer is decoded in the second, whose prefix cache receives the whole blocks; the
last, partial block of the prompt is computed again there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial

import numpy as np

from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache
from ridgeline.errors import BadInput
from ridgeline.plan.simulate.fast_forward_decode import insert_transferred_kv
from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    FleetConfig,
    FleetOutcome,
    FleetReplica,
    ReplicaConfig,
    RequestOutcome,
    SimulatedRequest,
)
from ridgeline.plan.simulate.replica import FILLER, SimulatedReplica
from ridgeline.plan.simulate.routing import Router, make_router
from ridgeline.records import Event, Finished, Preempted, Request, Sampling, Started, Token

__all__ = [
    "Autoscaling",
    "FaultModel",
    "FleetConfig",
    "FleetOutcome",
    "ReplicaConfig",
    "RequestOutcome",
    "SimulatedRequest",
    "simulate_fleet",
]


def simulate_fleet(
    requests: Iterable[SimulatedRequest], plan: FleetConfig, *, end_s: float = math.inf
) -> FleetOutcome:
    """Serve `requests` (ascending in time) until all have ended or `end_s` comes.

    Raises BadInput for an empty fleet and what `Scheduler.add` raises for a request that could
    never be served.
    """
    if not plan.builds:
        raise BadInput("a fleet needs at least one replica", value=0, limit=">= 1")
    world = _FleetSimulation(requests, plan)
    world.run(end_s)
    return world.outcome()


class _FleetSimulation:
    """The clock, the heap, and who is where."""

    def __init__(self, requests: Iterable[SimulatedRequest], plan: FleetConfig) -> None:
        self.plan, self.now_s = plan, 0.0
        self.lives = [RequestOutcome(request) for request in requests]
        self.rng = np.random.default_rng(plan.seed)
        self.routers: tuple[Router, Router] = (
            make_router(plan.router, plan.seed),
            make_router("least-loaded", plan.seed),
        )
        self.heap: list[tuple[float, int, Callable[[], None] | None, FleetReplica | None]] = []
        self.members: list[FleetReplica] = []
        self.load: list[int] = []
        self.active: tuple[list[int], list[int]] = ([], [])
        self.parked: tuple[list[int], list[int]] = ([], [])  # requests that found no replica up
        self.num_open = self.num_events = self.serial = 0
        self.area = self.seen_s = 0.0
        self.sizes: list[tuple[float, int]] = []
        self.samplings: dict[int, Sampling] = {}
        self.reads_prompts = any(
            not isinstance(build.scheduler().cache, NoPrefixCache)
            for build in dict.fromkeys((*plan.builds, *plan.decode))
        )
        for pool, builds in enumerate((plan.builds, plan.decode)):
            for build in builds:
                self._hire(build, pool, 0.0)
        if plan.scaling is not None:
            self._at(plan.scaling.interval_s, self._scale)

    # -- the loop

    def run(self, end_s: float) -> None:
        """Arrivals and the heap's instants in order; at a tie, arrivals first."""
        heap, lives, next_up = self.heap, self.lives, 0
        while True:
            arrives_s = lives[next_up].request.at_s if next_up < len(lives) else math.inf
            wakes_s = heap[0][0] if heap else math.inf
            at_s = min(arrives_s, wakes_s)
            if at_s >= end_s or at_s == math.inf:
                break
            if next_up == len(lives) and not self.num_open:
                break
            self._clock(at_s)
            if arrives_s <= wakes_s:
                self.num_open += 1
                self._arrive(next_up)
                next_up += 1
            else:
                self._wake(*heapq.heappop(heap))
        self._clock(min(end_s, self.now_s) if end_s < math.inf else self.now_s)
        self._close(next_up)

    def _clock(self, now_s: float) -> None:
        self.area += self.num_open * (now_s - self.seen_s)
        self.now_s = self.seen_s = now_s

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (at_s, self.serial, action, None))

    def _watch(self, member: FleetReplica) -> None:
        """Enter the member's next instant; an entry that has been overtaken is ignored later."""
        if member.station.wake_s < math.inf:
            self.serial += 1
            heapq.heappush(self.heap, (member.station.wake_s, self.serial, None, member))

    def _wake(
        self,
        at_s: float,
        _serial: int,
        action: Callable[[], None] | None,
        member: FleetReplica | None,
    ) -> None:
        self.num_events += 1
        if action is not None:
            action()
        elif member is not None and member.station.wake_s == at_s and member.up:
            for event in member.station.advance(at_s):
                self._note(member, event)
            self._watch(member)

    # -- requests

    def _arrive(self, index: int) -> None:
        """To a replica at once, or when the request may be served."""
        opens_s = self.lives[index].request.not_before_s
        if opens_s > self.now_s:
            self._at(opens_s, partial(self._route, index, 0))
        else:
            self._route(index, 0)

    def _route(self, index: int, pool: int) -> None:
        """Send request `index` to a replica of the pool, or park it until one is up."""
        active = self.active[pool]
        if not active:
            self.parked[pool].append(index)
            return
        request = self.lives[index].request
        member = self.members[self.routers[pool].choose(request, active, self.load)]
        name = str(index)
        engine_request = self._make_request(name, request, pool)
        if pool:
            insert_transferred_kv(
                member.station.scheduler, engine_request.prompt, engine_request.tenant, self.now_s
            )
        member.station.add(engine_request, self.now_s)
        member.in_flight[name] = index
        self.load[member.id] += 1
        self.lives[index].replica = member.id
        self._watch(member)

    def _make_request(self, name: str, request: SimulatedRequest, pool: int) -> Request:
        prompt = _prompt(name, request) if self.reads_prompts else _anything(request.num_prompt)
        num_output = request.num_output
        if self.plan.decode:
            prompt, num_output = (prompt, 1) if pool == 0 else ((*prompt, FILLER), num_output - 1)
        sampling = self.samplings.get(num_output)
        if sampling is None:
            sampling = Sampling(temperature=0.0, max_tokens=num_output, ignore_eos=True, seed=0)
            self.samplings[num_output] = sampling
        return Request(
            id=name,
            prompt=prompt,
            sampling=sampling,
            arrival_s=request.at_s,
            background=request.background,
        )

    def _note(self, member: FleetReplica, event: Event) -> None:
        index = member.in_flight.get(event.request_id)
        if index is None:
            return
        life = self.lives[index]
        if isinstance(event, Token):
            if life.first_s != life.first_s:
                life.first_s = event.at_s + member.build.asking_s
        elif isinstance(event, Started):
            if life.started_s != life.started_s:
                life.started_s, life.cached = event.at_s, event.cached_tokens
        elif isinstance(event, Preempted):
            life.num_preempted += 1
        elif isinstance(event, Finished):
            self._leave(member, event.request_id)
            self._ended(index, member, event.at_s)

    def _ended(self, index: int, member: FleetReplica, at_s: float) -> None:
        life = self.lives[index]
        if self.plan.decode and member.pool == 0 and life.request.num_output > 1:
            travel = self.plan.transfer_s
            delay_s = 0.0 if travel is None else travel(life.request.num_prompt)
            self._at(at_s + delay_s, lambda: self._route(index, 1))
            return
        life.finished_s = at_s + member.build.asking_s
        self.num_open -= 1

    def _leave(self, member: FleetReplica, name: str) -> None:
        del member.in_flight[name]
        self.load[member.id] -= 1
        if member.draining and not member.in_flight:
            self._dismiss(member)

    def _close(self, num_come: int) -> None:
        """What is still open at the end has not been served."""
        for life in self.lives[:num_come]:
            if life.finished_s != life.finished_s and not life.error:
                life.error = "unfinished when the simulation ended"
        del self.lives[num_come:]

    # -- replicas

    def _hire(self, build: ReplicaConfig, pool: int, startup_s: float) -> None:
        station = self._station(build, len(self.members))
        if self.plan.check is not None:
            station.check = self.plan.check
        member = FleetReplica(len(self.members), build, station, pool, self.now_s)
        self.members.append(member)
        self.load.append(0)
        if startup_s > 0:
            self._at(self.now_s + startup_s, lambda: self._open(member))
        else:
            self._open(member)

    def _station(self, build: ReplicaConfig, number: int) -> SimulatedReplica:
        sky = None if build.sky is None else build.sky(number)
        return SimulatedReplica(build.scheduler(), build.pace, leaps=self.plan.leaps, sky=sky)

    def _open(self, member: FleetReplica) -> None:
        """In service from now on."""
        if member.until_s < math.inf:
            return
        member.up = True
        if not member.draining:
            self.active[member.pool].append(member.id)
        self._sized()
        if self.plan.faults is not None:
            wait_s = float(self.rng.exponential(self.plan.faults.mtbf_s))
            self._at(self.now_s + wait_s, lambda: self._fail(member))
        waiting = list(self.parked[member.pool])
        self.parked[member.pool].clear()
        for index in waiting:
            self._route(index, member.pool)

    def _fail(self, member: FleetReplica) -> None:
        """What was in flight begins again elsewhere; the replica comes back empty."""
        if not member.up or member.until_s < math.inf or self.plan.faults is None:
            return
        self._retire(member)
        lost, member.in_flight = list(member.in_flight.values()), {}
        self.load[member.id] = 0
        member.num_busy_s += member.station.busy_s
        member.num_steps += member.station.num_steps
        member.station.drop(self.now_s)
        station = self._station(member.build, member.id)
        station.check = member.station.check
        member.station = station
        if member.draining:
            self._dismiss(member)
        else:
            self._at(self.now_s + self.plan.faults.repair_s, lambda: self._open(member))
        for index in lost:
            self.lives[index].num_restarts += 1
            self._route(index, 0)

    def _retire(self, member: FleetReplica) -> None:
        member.up = False
        if member.id in self.active[member.pool]:
            self.active[member.pool].remove(member.id)
        self._sized()

    def _dismiss(self, member: FleetReplica) -> None:
        """Not paid for any longer."""
        member.until_s, member.up = self.now_s, False
        self._sized()

    def _sized(self) -> None:
        self.sizes.append((self.now_s, sum(member.up for member in self.members)))

    def _scale(self) -> None:
        """Replicas of the first pool after the requests in flight."""
        scaling = self.plan.scaling
        assert scaling is not None
        here = [m for m in self.members if m.pool == 0 and m.until_s == math.inf]
        staying = [m for m in here if not m.draining]
        in_flight = sum(self.load[m.id] for m in here) + len(self.parked[0])
        wanted = min(scaling.most, max(scaling.least, math.ceil(in_flight / scaling.target)))
        for _ in range(wanted - len(staying)):
            self._hire(self.plan.builds[0], 0, scaling.startup_s)
        emptiest = sorted(staying, key=lambda m: (self.load[m.id], -m.id))
        for member in emptiest[: max(0, len(staying) - wanted)]:
            self._drain(member)
        self._at(self.now_s + scaling.interval_s, self._scale)

    def _drain(self, member: FleetReplica) -> None:
        member.draining = True
        if member.id in self.active[0]:
            self.active[0].remove(member.id)
        if not member.in_flight:
            self._dismiss(member)

    def outcome(self) -> FleetOutcome:
        for member in self.members:
            member.num_busy_s += member.station.busy_s
            member.num_steps += member.station.num_steps
        return FleetOutcome(
            lives=tuple(self.lives),
            members=tuple(self.members),
            duration_s=self.now_s,
            area=self.area,
            num_steps=sum(member.num_steps for member in self.members),
            num_events=self.num_events,
            num_replicas=tuple(self.sizes),
        )


@lru_cache(maxsize=4096)
def _anything(num_tokens: int) -> tuple[int, ...]:
    return (FILLER,) * num_tokens


def _prompt(name: str, request: SimulatedRequest) -> tuple[int, ...]:
    """Token ids that are equal where blocks are, and the request's own beyond them."""
    tokens: tuple[int, ...] = ()
    for block in request.prefix:
        tokens += (block + 1,) * request.prefix_block
    if len(tokens) >= request.num_prompt:
        return tokens[: request.num_prompt]
    rest = request.num_prompt - len(tokens)
    return (*tokens, -1 - int(name), *(FILLER,) * (rest - 1))
