"""A fleet on a virtual clock: arrivals, a router, and replicas with the engine's own scheduler.

    requests ─▶ router ─▶ replica (scheduler, blocks, prefix cache; modelled step times) ─▶ outcomes
                  ▲            │
                  └── autoscaler, failures (requests in flight restart on another replica)

All events are in one heap, ties broken by order of insertion, so a seed determines every number.
Nothing is examined between two events: a replica whose sequences only decode costs nothing until
one of them finishes or a request arrives.

A replica that has an answer stored gives it without a step (`answer_cache`).

Batch requests with a deadline are not routed: replicas take them when they have room for more
(`batch_queue`).

With a `decode` pool the fleet is disaggregated: a prompt is computed in the first pool, its KV is
transferred, and the second pool decodes. The second pool's prefix cache receives the full blocks;
the last, partial block of the prompt is computed again there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

from ridgeline.engine.scheduler.admission.queue_limits import QueueLimiter, QueueLimits
from ridgeline.engine.scheduler.kv.cache_tiers import CacheTiers, TierTotals
from ridgeline.engine.scheduler.kv.prefix_cache import NoPrefixCache
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.errors import BadInput, EngineFull
from ridgeline.plan.simulate.answer_cache import HIT_S, hit_s
from ridgeline.plan.simulate.batch_queue import BatchQueue
from ridgeline.plan.simulate.kv_tiers import add_totals
from ridgeline.plan.simulate.records import (
    Autoscaling,
    FleetConfig,
    FleetOutcome,
    FleetReplica,
    ReplicaConfig,
    RequestOutcome,
    SimulatedRequest,
)
from ridgeline.plan.simulate.replica import FILLER, SimulatedReplica
from ridgeline.plan.simulate.shared_replica import SharedReplica
from ridgeline.records import (
    CachePolicy,
    Event,
    Finished,
    Preempted,
    Request,
    Sampling,
    Started,
    Token,
)
from ridgeline.routing import make_router
from ridgeline.routing.autoscaler import Autoscaler, FleetSignals, ScalingPolicy
from ridgeline.routing.base import FleetLoad, Router


def simulate_fleet(
    requests: Iterable[SimulatedRequest], config: FleetConfig, *, end_s: float = math.inf
) -> FleetOutcome:
    """Serve `requests`, ascending in time, until all have finished or `end_s` is reached.

    Raises BadInput for an empty fleet, and what `Scheduler.add` raises for a request that could
    never be served.
    """
    if not config.replicas:
        raise BadInput("a fleet needs at least one replica", value=0, limit=">= 1")
    requests = list(requests)
    if config.decode and any(request.deadline_s is not None for request in requests):
        raise BadInput("batch requests with a deadline need replicas that prefill and decode")
    simulation = _FleetSimulation(requests, config)
    simulation.run(end_s)
    return simulation.outcome()


class _FleetSimulation:
    """The clock, the event heap, and the state of every request and replica."""

    def __init__(self, requests: Iterable[SimulatedRequest], config: FleetConfig) -> None:
        self.config, self.now_s = config, 0.0
        self.outcomes = [RequestOutcome(request) for request in requests]
        self.lives_s: dict[int, Iterator[float]] = {}  # by replica, to its failures
        self.batches = BatchQueue(config.off_peak)
        self.batches_open_s = -math.inf  # when they are looked at next, outside of the window
        self.routers: dict[tuple[int, str], Router] = {}  # by pool and model
        self.heap: list[tuple[float, int, Callable[[], None] | None, FleetReplica | None]] = []
        self.replicas: list[FleetReplica] = []
        self.load = FleetLoad()
        self.active: tuple[list[int], list[int]] = ([], [])
        self.held: tuple[list[int], list[int]] = ([], [])  # while no replica is in service
        self.num_open = self.num_events = self.serial = 0
        self.area = self.area_until_s = 0.0
        self.num_replicas: list[tuple[float, int]] = []
        self.samplings: dict[int, Sampling] = {}
        self.tiers = TierTotals()
        self.reads_prompts = any(
            not isinstance(replica.scheduler().cache, NoPrefixCache)
            for replica in dict.fromkeys((*config.replicas, *config.decode))
        )
        self.has_several = len({replica.models for replica in config.replicas}) > 1
        for pool, replicas in enumerate((config.replicas, config.decode)):
            for replica in replicas:
                self._add_replica(replica, pool, 0.0)
        if config.scaling is not None:
            self.autoscaler = _autoscaler(config.scaling)
            self._schedule(config.scaling.interval_s, self._scale)

    # -- the loop

    def run(self, end_s: float) -> None:
        """Process arrivals and heap events in order of time; at a tie, arrivals first."""
        heap, outcomes, next_arrival = self.heap, self.outcomes, 0
        while True:
            pending = next_arrival < len(outcomes)
            arrives_s = outcomes[next_arrival].request.at_s if pending else math.inf
            wakes_s = heap[0][0] if heap else math.inf
            at_s = min(arrives_s, wakes_s)
            if at_s >= end_s or at_s == math.inf:
                break
            if not pending and not self.num_open:
                break
            self._advance_clock(at_s)
            if arrives_s <= wakes_s:
                self.num_open += 1
                self._arrive(next_arrival)
                next_arrival += 1
            else:
                self._run_event(*heapq.heappop(heap))
        self._advance_clock(min(end_s, self.now_s) if end_s < math.inf else self.now_s)
        self._close(next_arrival)

    def _advance_clock(self, now_s: float) -> None:
        self.area += self.num_open * (now_s - self.area_until_s)
        self.now_s = self.area_until_s = now_s

    def _schedule(self, at_s: float, action: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (at_s, self.serial, action, None))

    def _schedule_replica(self, replica: FleetReplica) -> None:
        """Insert the replica's next event; an entry that is out of date by then is ignored."""
        if replica.simulated.wake_s < math.inf:
            self.serial += 1
            heapq.heappush(self.heap, (replica.simulated.wake_s, self.serial, None, replica))

    def _run_event(
        self,
        at_s: float,
        _serial: int,
        action: Callable[[], None] | None,
        replica: FleetReplica | None,
    ) -> None:
        self.num_events += 1
        if action is not None:
            action()
        elif replica is not None and replica.simulated.wake_s == at_s and replica.up:
            for event in replica.simulated.advance(at_s):
                self._handle_event(replica, event)
            self._schedule_replica(replica)

    # -- requests

    def _arrive(self, index: int) -> None:
        request = self.outcomes[index].request
        if request.deadline_s is not None:
            if self.batches.add(index, request.deadline_s):
                self._schedule(request.deadline_s, partial(self._expire, request.deadline_s))
            self._start_batches()
        elif request.not_before_s > self.now_s:
            self._schedule(request.not_before_s, partial(self._route, index, 0))
        else:
            self._route(index, 0)

    def _start_batches(self) -> None:
        """Give batch requests that wait to the replicas with the fewest of them, as far as those
        have slots."""
        queue, opens_s = self.batches, self.batches.opens_s(self.now_s)
        if queue.first is not None and opens_s > self.now_s:
            if self.batches_open_s < opens_s:
                self.batches_open_s = opens_s
                self._schedule(opens_s, self._start_batches)
            return
        while (index := queue.first) is not None:
            model = self.outcomes[index].request.model
            active = self._active_with(model, 0)
            chosen = min(active, key=lambda i: (queue.num_running(i), i), default=None)
            if chosen is None or queue.num_running(chosen) >= self.replicas[chosen].num_slots:
                return
            queue.take(chosen, self.replicas[chosen].num_slots, self.now_s)
            self._send(index, self.replicas[chosen])

    def _expire(self, deadline_s: float) -> None:
        """The deadline of batch requests has passed; what runs goes on, in vain."""
        for index in self.batches.expire(deadline_s):
            self.outcomes[index].error = "its deadline passed"
            self.num_open -= 1

    def _route(self, index: int, pool: int) -> None:
        """Send request `index` to a replica of the pool, or hold it until one is in service."""
        request = self.outcomes[index].request
        active = self._active_with(request.model, pool)
        if not active:
            self.held[pool].append(index)
            return
        router = self._router(request.model, pool)
        replica = self.replicas[router.choose(request, active, self.load)]
        if pool == 0 and self._answer_again(index, replica):
            return
        name = str(index)
        if replica.limiter is not None and not self._admit(replica, replica.limiter, name, index):
            return
        self._send(index, replica)
        replica.sent_s[name] = self.now_s
        self.load.note_sent(replica.id, request.num_prompt)

    def _answer_again(self, index: int, replica: FleetReplica) -> bool:
        """Whether the replica has the answer stored, which it then gives without a step."""
        outcome, answers = self.outcomes[index], replica.answers
        request = outcome.request
        is_stored = request.answered and not request.question
        if answers is not None and request.answer is not None:
            is_stored = answers.find(request.answer, self.now_s)
        if not is_stored:
            return False
        outcome.answered, outcome.replica = True, replica.id
        outcome.started_s, outcome.first_s = self.now_s, self.now_s + HIT_S
        end_s = self.now_s + hit_s(request.num_output)
        self._schedule(end_s, partial(self._finish, index, end_s))
        return True

    def _send(self, index: int, replica: FleetReplica) -> None:
        """Begin a request on a replica."""
        name, outcome = str(index), self.outcomes[index]
        request = self._make_request(name, outcome, replica.pool)
        model, has_kv = outcome.request.model, replica.pool > 0
        replica.simulated.add(request, self.now_s, model, has_kv=has_kv)
        replica.in_flight[name], outcome.replica = index, replica.id
        self._schedule_replica(replica)

    def _active_with(self, model: str, pool: int) -> list[int]:
        """The replicas in service of a pool that have the model."""
        active = self.active[pool]
        if not self.has_several:
            return active
        return [i for i in active if model in self.replicas[i].config.models]

    def _router(self, model: str, pool: int) -> Router:
        """The router of a model's requests; those that bring their cache go where load is least."""
        router = self.routers.get((pool, model))
        if router is None:
            name = "least-loaded" if pool else self.config.router
            router = self.routers[pool, model] = make_router(name, self.config.seed)
        return router

    def _admit(self, replica: FleetReplica, limiter: QueueLimiter, name: str, index: int) -> bool:
        """Whether the replica's throttle takes the request; a refused one has ended."""
        request = self.outcomes[index].request
        slo = None if request.background else self.config.throttle
        try:
            limiter.admit(name, request.num_prompt, slo, self.now_s)
        except EngineFull as error:
            self.outcomes[index].error = f"refused by replica {replica.id}: {error.reason}"
            self.num_open -= 1
            return False
        return True

    def _make_request(self, name: str, outcome: RequestOutcome, pool: int) -> Request:
        request, resumed = outcome.request, outcome.num_resumed
        if request.answered:  # by a similar question's answer: only the question is embedded
            prompt = (-1 - int(name), *_filler_prompt(request.question - 1))
        elif self.reads_prompts:
            prompt = _prompt(name, request)
        else:
            prompt = _filler_prompt(request.num_prompt)
        if resumed:  # known tokens, to be computed again like those of the prompt
            prompt = (*prompt, *(FILLER,) * resumed)
        num_output = 1 if request.answered else request.num_output - resumed
        if self.config.decode:
            prompt, num_output = (prompt, 1) if pool == 0 else ((*prompt, FILLER), num_output - 1)
        sampling = self.samplings.get(num_output)
        if sampling is None:
            sampling = Sampling(temperature=0.0, max_tokens=num_output, ignore_eos=True, seed=0)
            self.samplings[num_output] = sampling
        pinned = 0 if request.answered else request.pinned
        return Request(
            id=name,
            prompt=prompt,
            sampling=sampling,
            arrival_s=request.at_s,
            background=request.background,
            slo=None if request.background else self.config.slo,
            cache=CachePolicy(pin_tokens=pinned) if pinned else None,
        )

    def _handle_event(self, replica: FleetReplica, event: Event) -> None:
        index = replica.in_flight.get(event.request_id)
        if index is None:
            return
        outcome = self.outcomes[index]
        if replica.limiter is not None:
            replica.limiter.observe(event)
        if isinstance(event, Token):
            if math.isnan(outcome.first_s):
                outcome.first_s = event.at_s + replica.config.overhead_s
            self._note_first_token(replica, event, outcome)
        elif isinstance(event, Started):
            if math.isnan(outcome.started_s):
                outcome.started_s, outcome.cached = event.at_s, event.cached_tokens
        elif isinstance(event, Preempted):
            outcome.num_preempted += 1
        elif isinstance(event, Finished):
            del replica.in_flight[event.request_id]
            if replica.limiter is not None:
                replica.limiter.remove(event.request_id)
            is_batch = self.batches.is_running(index, replica.id)
            if not is_batch:
                self.load.note_ended(replica.id)
            if replica.draining and not replica.in_flight:
                self._terminate(replica)
            if not is_batch or self.batches.end(index, replica.id, replica.num_slots, event.at_s):
                self._finish_stage(index, replica, event.at_s)
            if is_batch:
                self._start_batches()

    def _note_first_token(
        self, replica: FleetReplica, event: Token, outcome: RequestOutcome
    ) -> None:
        sent_s = replica.sent_s.pop(event.request_id, None)
        if sent_s is not None:
            num_prompt = outcome.request.num_prompt
            self.load.note_first_token(replica.id, num_prompt, sent_s, event.at_s)

    def _finish_stage(self, index: int, replica: FleetReplica, at_s: float) -> None:
        """The request is finished, or its KV goes on to the decode pool."""
        outcome = self.outcomes[index]
        num_left = outcome.request.num_output - outcome.num_resumed
        if self.config.decode and replica.pool == 0 and num_left > 1:
            transfer_s, num_known = self.config.transfer_s, outcome.request.num_prompt
            num_known += outcome.num_resumed
            delay_s = 0.0 if transfer_s is None else transfer_s(num_known)
            self._schedule(at_s + delay_s, lambda: self._route(index, 1))
            return
        end_s = at_s + replica.config.overhead_s
        if outcome.request.answered:
            outcome.answered = True
            end_s += hit_s(outcome.request.num_output)
        if replica.answers is not None and outcome.request.answer is not None:
            replica.answers.store(outcome.request.answer, outcome.request.num_output, at_s)
        self._finish(index, end_s)

    def _finish(self, index: int, end_s: float) -> None:
        self.outcomes[index].finished_s = end_s
        self.num_open -= 1

    def _close(self, num_arrived: int) -> None:
        """Mark requests that are unfinished at the end; drop those that have not arrived."""
        for outcome in self.outcomes[:num_arrived]:
            if math.isnan(outcome.finished_s) and not outcome.error:
                outcome.error = "unfinished when the simulation ended"
        del self.outcomes[num_arrived:]

    # -- replicas

    def _add_replica(self, config: ReplicaConfig, pool: int, startup_s: float) -> None:
        simulated = self._simulate_replica(config, len(self.replicas))
        if self.config.check is not None:
            simulated.check = self.config.check
        replica = FleetReplica(len(self.replicas), config, simulated, pool, self.now_s)
        replica.limiter = self._new_limiter()
        replica.answers = None if self.config.answers is None else self.config.answers()
        self.replicas.append(replica)
        self.load.add_replica()
        if startup_s > 0:
            self._schedule(self.now_s + startup_s, lambda: self._enter_service(replica))
        else:
            self._enter_service(replica)

    def _simulate_replica(
        self, config: ReplicaConfig, number: int
    ) -> SimulatedReplica | SharedReplica:
        per_model = max(config.num_stages, config.num_groups)
        if per_model > 1 or config.further:
            kinds = [(config.model, config.scheduler, config.step_times)]
            kinds += [(lane.model, lane.scheduler, lane.step_times) for lane in config.further]
            return SharedReplica(
                [(model, make(), times) for model, make, times in kinds for _ in range(per_model)],
                num_stages=config.num_stages,
                groups=config.num_groups > 1,
            )
        return SimulatedReplica(
            config.scheduler(),
            config.step_times,
            fast_forward=self.config.fast_forward,
            interference=None if config.interference is None else config.interference(number),
        )

    def _new_limiter(self) -> QueueLimiter | None:
        if self.config.throttle is None:
            return None
        return QueueLimiter(QueueLimits(throttle=True))

    def _enter_service(self, replica: FleetReplica) -> None:
        if replica.until_s < math.inf:
            return
        replica.up = True
        if not replica.draining:
            self.active[replica.pool].append(replica.id)
        self._record_size()
        if self.config.faults is not None:
            if replica.id not in self.lives_s:
                lives_s = self.config.faults.lives_s(self.config.seed, replica.id)
                self.lives_s[replica.id] = lives_s
            life_s = next(self.lives_s[replica.id])
            self._schedule(self.now_s + life_s, lambda: self._fail(replica))
        held = list(self.held[replica.pool])
        self.held[replica.pool].clear()
        for index in held:
            self._route(index, replica.pool)
        self._start_batches()

    def _fail(self, replica: FleetReplica) -> None:
        """Restart its requests elsewhere; the replica returns empty after its repair."""
        if not replica.up or replica.until_s < math.inf or self.config.faults is None:
            return
        replica.up = False
        self._deactivate(replica)
        self._record_size()
        lost, replica.in_flight = replica.in_flight, {}
        self.load.clear(replica.id)
        replica.sent_s.clear()
        failed = replica.simulated
        replica.num_busy_s += failed.busy_s
        replica.num_steps += failed.num_steps
        self._count_tiers(failed.schedulers)
        generated = failed.stop(self.now_s, list(lost))
        replica.simulated = self._simulate_replica(replica.config, replica.id)
        replica.simulated.check = failed.check
        replica.limiter = self._new_limiter()
        replica.answers = None if self.config.answers is None else self.config.answers()
        if replica.draining:
            self._terminate(replica)
        else:
            back_s = self.now_s + self.config.faults.repair_s
            self._schedule(back_s, lambda: self._enter_service(replica))
        for index, num_tokens in zip(lost.values(), generated, strict=True):
            outcome = self.outcomes[index]
            outcome.num_restarts += 1
            if self.config.resume:
                outcome.num_resumed += num_tokens + replica.pool  # the first pool made one
            if not self.batches.is_running(index, replica.id):
                self._route(index, 0)
        self.batches.put_back(replica.id)
        self._start_batches()

    def _deactivate(self, replica: FleetReplica) -> None:
        """Route no more requests to the replica."""
        active = self.active[replica.pool]
        if replica.id in active:
            active.remove(replica.id)

    def _terminate(self, replica: FleetReplica) -> None:
        """Stop paying for the replica."""
        replica.until_s, replica.up = self.now_s, False
        self._record_size()

    def _record_size(self) -> None:
        self.num_replicas.append((self.now_s, sum(replica.up for replica in self.replicas)))

    def _scale(self) -> None:
        """Adjust the number of replicas of the first pool to the load, as a gateway would."""
        scaling = self.config.scaling
        assert scaling is not None
        paid = [r for r in self.replicas if r.pool == 0 and r.until_s == math.inf]
        serving = [r for r in paid if not r.draining]
        in_flight = sum(self.load.in_flight[r.id] for r in paid) + len(self.held[0])
        sent_s = [next(iter(r.sent_s.values()), self.now_s) for r in paid]  # the oldest of each
        active = self.active[0]
        signals = FleetSignals(
            in_flight=in_flight,
            num_replicas=len(serving),
            queue_age_s=self.now_s - min(sent_s, default=self.now_s),
            batch_demand=self.batches.demand(active, self.now_s),
        )
        target = self.autoscaler.decide(signals, self.now_s)
        for _ in range(target - len(serving)):
            self._add_replica(self.config.replicas[0], 0, scaling.startup_s)
        emptiest = sorted(serving, key=lambda r: (self.load.in_flight[r.id], -r.id))
        for replica in emptiest[: max(0, len(serving) - target)]:
            replica.draining = True
            self._deactivate(replica)
            if not replica.in_flight:
                self._terminate(replica)
        self._schedule(self.now_s + scaling.interval_s, self._scale)

    def outcome(self) -> FleetOutcome:
        for replica in self.replicas:
            replica.num_busy_s += replica.simulated.busy_s
            replica.num_steps += replica.simulated.num_steps
            self._count_tiers(replica.simulated.schedulers)
        return FleetOutcome(
            requests=tuple(self.outcomes),
            replicas=tuple(self.replicas),
            duration_s=self.now_s,
            area=self.area,
            num_steps=sum(replica.num_steps for replica in self.replicas),
            num_events=self.num_events,
            num_replicas=tuple(self.num_replicas),
            tiers=self.tiers,
        )

    def _count_tiers(self, schedulers: Iterable[Scheduler]) -> None:
        """Add what a replica has loaded from the tiers of its KV cache."""
        for scheduler in schedulers:
            if isinstance(scheduler.cache.tiers, CacheTiers):
                self.tiers = add_totals(self.tiers, scheduler.cache.tiers.totals)


def _autoscaler(scaling: Autoscaling) -> Autoscaler:
    return Autoscaler(
        ScalingPolicy(
            target_in_flight=scaling.target,
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            allowed_wait_s=scaling.allowed_wait_s,
            stable_s=scaling.stable_s,
        )
    )


@lru_cache(maxsize=4096)
def _filler_prompt(num_tokens: int) -> tuple[int, ...]:
    return (FILLER,) * num_tokens


def _prompt(name: str, request: SimulatedRequest) -> tuple[int, ...]:
    """Token ids that are equal where prefix blocks are equal, and unique after them."""
    tokens: tuple[int, ...] = ()
    for block in request.prefix:
        tokens += (block + 1,) * request.prefix_block
    if len(tokens) >= request.num_prompt:
        return tokens[: request.num_prompt]
    rest = request.num_prompt - len(tokens)
    return (*tokens, -1 - int(name), *(FILLER,) * (rest - 1))
