"""A fleet of twins behind the real gateway, in one process and on virtual time.

    trace ─▶ Gateway (routing, resume, parking, autoscaler) ─▶ HTTP in memory ─▶ twins' servers

Gateway, servers, HTTP parsers, engine loops and schedulers are the real ones. Steps take their
modelled time on a virtual clock, so an hour passes in the time that its computing takes.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from uvicorn.server import ServerState

from ridgeline.config.server import ServerOptions
from ridgeline.engine import engine_loop
from ridgeline.engine.build import make_scheduler
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.fleet.backends import Backends
from ridgeline.fleet.gateway import Gateway, GatewayConfig
from ridgeline.fleet.parking import Parking
from ridgeline.fleet.retry_budget import RetryBudget
from ridgeline.fleet.upstream import BackendAddress
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import (
    Autoscaling,
    FaultModel,
    FleetConfig,
    FleetOutcome,
    ReplicaConfig,
    RequestOutcome,
    SimulatedRequest,
)
from ridgeline.plan.simulate.summary import meets_slo
from ridgeline.records import Slo
from ridgeline.routing import make_router
from ridgeline.routing.autoscaler import ScalingPolicy
from ridgeline.serve.app import build_routes, create_app
from ridgeline.serve.server import uvicorn_config
from ridgeline.twin import build
from ridgeline.twin.build import TwinModel, plan_twin, resolved_settings, step_times_of
from ridgeline.twin.config import TwinConfig
from tests.simulation.virtual_time import VirtualLoop, VirtualThreads

FIRST_PORT = 9000
_DONE = b"data: [DONE]"


class TwinFleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to rehearse: `count` twins at the start, and what happens to them. `probe_s`: time
    between two probes of a twin by the gateway."""

    twin: TwinConfig
    count: int
    router: str = "least-loaded"
    scaling: Autoscaling | None = None
    faults: FaultModel | None = None
    seed: int = 0
    probe_s: float = 1.0


class _Pipe(asyncio.Transport):
    """One end of a connection in memory."""

    def __init__(self, loop: VirtualLoop, protocol: Any) -> None:
        super().__init__()
        self._loop, self.protocol = loop, protocol
        self.peer: _Pipe = self
        self._is_closing = self._is_lost = False
        self._can_read, self._inbound = True, list[bytes]()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._loop.call_soon(self.peer._arrive, bytes(data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose, None)
            self._loop.call_soon(self.peer.close)

    def abort(self) -> None:
        self.close()

    def reset(self) -> None:
        """The process at this end was killed: both ends are lost."""
        self._is_closing = self._is_lost = True
        self._loop.call_soon(self.peer._lose, ConnectionResetError())

    def pause_reading(self) -> None:
        self._can_read = False

    def resume_reading(self) -> None:
        self._can_read = True
        self._loop.call_soon(self._read)

    def is_reading(self) -> bool:
        return self._can_read

    def _arrive(self, data: bytes) -> None:
        self._inbound.append(data)
        self._read()

    def _read(self) -> None:
        while self._inbound and self._can_read and not self._is_lost:
            self.protocol.data_received(self._inbound.pop(0))

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self.protocol.connection_lost(error)


class FleetLoop(VirtualLoop):
    """Connections to a port reach the twin that listens there."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.now_s = 0.0
        self.twins: dict[int, Twin] = {}

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> Any:
        twin = self.twins.get(port)
        if twin is None:
            raise ConnectionRefusedError(111, "Connection refused")
        ends = _Pipe(self, factory()), _Pipe(self, twin.make_protocol())
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        twin.pipes.append(ends[1])
        for end in ends:
            end.protocol.connection_made(end)
        return ends[0], ends[0].protocol


_load_tokenizer, _list_words = build._tokenizer_of, build.ordinary_tokens
_tokenizers: dict[str, tuple[Tokenizer, ModelSpec]] = {}
_words: dict[tuple[int, int], list[int]] = {}
_plans: dict[bytes, TwinModel] = {}


def _shared_tokenizer(model: str, spec: ModelSpec) -> tuple[Tokenizer, ModelSpec]:
    """All twins of a model share its tokenizer: reading one takes longer than many requests."""
    if model not in _tokenizers:
        _tokenizers[model] = _load_tokenizer(model, spec)
    return _tokenizers[model]


def _shared_words(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    key = (id(tokenizer), vocab_size)
    if key not in _words:
        _words[key] = _list_words(tokenizer, vocab_size)
    return _words[key]


def _shared_plan(config: TwinConfig) -> TwinModel:
    key = msgspec.json.encode(config)
    if key not in _plans:
        _plans[key] = plan_twin(config)
    return _plans[key]


class Twin:
    """The server of one twin, listening on `port` until `kill` or `stop`."""

    _routes: list[Any] | None = None  # FastAPI builds them slowly: all twins share one set

    def __init__(
        self, loop: FleetLoop, threads: VirtualThreads, port: int, config: TwinConfig
    ) -> None:
        self._loop, self.port, self.pipes = loop, port, list[_Pipe]()
        with (
            mock.patch.object(engine_loop, "threading", threads),
            mock.patch.object(build, "_tokenizer_of", _shared_tokenizer),
            mock.patch.object(build, "ordinary_tokens", _shared_words),
        ):
            self.engine, _ = build.open_engine(
                config, _shared_plan(config), clock=loop.time, sleep=threads.sleep
            )
        self.app = create_app(self.engine, ServerOptions())
        if Twin._routes is None:
            build_routes(self.app)
            Twin._routes = list(self.app.router.routes)
        self.app.router.routes = Twin._routes
        service = self.app.state.service
        service.now = service.metrics.now = service.drain._now = loop.time
        self._config = uvicorn_config(self.app, ServerOptions())
        self._state = ServerState()

    def start(self) -> None:
        self._config.load()
        self._loop.twins[self.port] = self

    def make_protocol(self) -> Any:
        kind: Any = self._config.http_protocol_class
        return kind(config=self._config, server_state=self._state, app_state={}, _loop=self._loop)

    def kill(self) -> None:
        """Its process ends at once."""
        self._loop.twins.pop(self.port, None)
        for pipe in self.pipes:
            pipe.reset()
        for task in list(self._state.tasks):
            task.cancel()
        self.engine.close()

    @property
    def address(self) -> BackendAddress:
        return BackendAddress("127.0.0.1", self.port)


class _Place:
    """A replica that is paid for: the twin in it, if it is up."""

    def __init__(self, port: int) -> None:
        self.port, self.is_draining = port, False
        self.twin: Twin | None = None


class TwinFleet:
    """Gateway, twins, autoscaler and failures on one virtual loop."""

    def __init__(self, loop: FleetLoop, plan: TwinFleetPlan) -> None:
        self._loop, self._plan = loop, plan
        self._threads = VirtualThreads(loop, loop.rng, 0.0)
        self._lives_s: dict[int, Iterator[float]] = {}  # by port, to its failures
        self.places: list[_Place] = []
        self._next_port = FIRST_PORT
        self.backends = Backends(
            [], make_router(plan.router, plan.seed), probe_interval_s=plan.probe_s
        )
        scaling = ScalingPolicy(target_in_flight=1e9)
        if plan.scaling is not None:
            scaling = ScalingPolicy(
                target_in_flight=plan.scaling.target,
                min_replicas=plan.scaling.min_replicas,
                max_replicas=plan.scaling.max_replicas,
                stable_s=plan.scaling.stable_s,
                allowed_wait_s=plan.scaling.allowed_wait_s,
            )
        self.gateway = Gateway(
            self.backends, Parking(10**6, 1e6), RetryBudget(1.0), GatewayConfig(scaling=scaling)
        )
        self.num_killed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: Sequence[SimulatedRequest]) -> list[RequestOutcome]:
        """Send the trace; what became of each request."""
        await self.backends.start()
        for _ in range(self._plan.count):
            self._start_twin(self._add_place())
        while sum(backend.state == "ready" for backend in self.backends.all) < self._plan.count:
            await asyncio.sleep(0.1)
        if self._plan.scaling is not None:
            self._run(self._scale(self._plan.scaling))
        start_s = self._loop.time()
        outcomes = await asyncio.gather(
            *[self._send(request, start_s, number) for number, request in enumerate(requests)]
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.backends.stop()
        for place in self.places:
            if place.twin is not None:
                place.twin.kill()
        return outcomes

    def metric(self, name: str) -> float:
        """A series of the gateway's page."""
        page = self.gateway.metrics.render().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.M))

    # -- replicas

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add_place(self) -> _Place:
        place = _Place(self._next_port)
        self._next_port += 1
        self.places.append(place)
        return place

    def _start_twin(self, place: _Place) -> None:
        place.twin = Twin(self._loop, self._threads, place.port, self._plan.twin)
        place.twin.start()
        self._publish()
        if self._plan.faults is not None:
            self._run(self._fail_later(place, self._plan.faults))

    def _publish(self) -> None:
        """Tell the gateway which twins there are; one that was killed is found out by itself."""
        self.backends.replace(
            [BackendAddress("127.0.0.1", p.port) for p in self.places if not p.is_draining]
        )

    async def _fail_later(self, place: _Place, faults: FaultModel) -> None:
        if place.port not in self._lives_s:
            number = place.port - FIRST_PORT  # as the simulator's replica of that number
            self._lives_s[place.port] = faults.lives_s(self._plan.seed, number)
        await asyncio.sleep(next(self._lives_s[place.port]))
        twin, place.twin = place.twin, None
        if twin is None:
            return
        self.num_killed += 1
        twin.kill()
        if not place.is_draining:
            await asyncio.sleep(faults.repair_s)
            self._start_twin(place)

    async def _scale(self, scaling: Autoscaling) -> None:
        """Follow the gateway's metric, as KEDA would."""
        while True:
            await asyncio.sleep(scaling.interval_s)
            wanted = int(self.metric("ridgeline_wanted_replicas"))
            serving = [place for place in self.places if not place.is_draining]
            for _ in range(wanted - len(serving)):
                self._run(self._start_later(self._add_place(), scaling.startup_s))
            load = {backend.address.port: backend.id for backend in self.backends.all}
            serving.sort(key=lambda p: (self._in_flight(load, p), -p.port))
            for place in serving[: max(0, len(serving) - wanted)]:
                place.is_draining = True
                self._publish()
                self._run(self._stop_when_idle(load.get(place.port), place))

    def _in_flight(self, ids: dict[int, int], place: _Place) -> int:
        return self.backends.load.in_flight[ids[place.port]] if place.port in ids else 0

    async def _start_later(self, place: _Place, startup_s: float) -> None:
        await asyncio.sleep(startup_s)
        if not place.is_draining:
            self._start_twin(place)

    async def _stop_when_idle(self, backend: int | None, place: _Place) -> None:
        while backend is not None and self.backends.load.in_flight[backend]:
            await asyncio.sleep(1.0)
        twin, place.twin = place.twin, None
        if twin is not None:
            twin.kill()

    # -- requests

    async def _send(self, request: SimulatedRequest, start_s: float, number: int) -> RequestOutcome:
        await asyncio.sleep(start_s + request.at_s - self._loop.time())
        outcome = RequestOutcome(request)
        body = {
            "prompt": [*divmod(number, 997), *[i % 89 for i in range(request.num_prompt - 2)]],
            "max_tokens": request.num_output,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        incoming = [{"type": "http.request", "body": msgspec.json.encode(body)}]
        is_gone = asyncio.Event()
        tail = b""

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal tail
            if message["type"] == "http.response.start":
                outcome.error = "" if message["status"] == 200 else str(message["status"])
                return
            if data := message.get("body", b""):
                if math.isnan(outcome.first_s) and b'"text"' in data:
                    outcome.first_s = self._loop.time() - start_s
                tail = data

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
        }
        await self.gateway(scope, receive, send)
        if _DONE not in tail or outcome.error:
            outcome.error = outcome.error or "the stream was cut"
            return outcome
        outcome.finished_s = self._loop.time() - start_s
        return outcome


def rehearse(
    plan: TwinFleetPlan, requests: Sequence[SimulatedRequest]
) -> tuple[list[RequestOutcome], TwinFleet]:
    """Serve the trace by a fleet of twins."""
    loop = FleetLoop()
    try:
        asyncio.set_event_loop(loop)
        fleet = TwinFleet(loop, plan)
        outcomes = loop.run_until_complete(fleet.serve(requests))
        assert not loop.faults, loop.faults[:3]
        return outcomes, fleet
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def simulate_same(plan: TwinFleetPlan, requests: Sequence[SimulatedRequest]) -> FleetOutcome:
    """The same fleet and trace in `ridgeline simulate`'s simulator."""
    model = plan_twin(plan.twin)
    resolved = resolved_settings(plan.twin, model, model.replica.spec)
    replica = ReplicaConfig(
        name="twin",
        scheduler=lambda: make_scheduler(resolved),
        step_times=step_times_of(plan.twin, model.replica),
        overhead_s=model.replica.efficiency.first_s,
    )
    return simulate_fleet(
        requests,
        FleetConfig(
            replicas=(replica,) * plan.count,
            router=plan.router,
            scaling=plan.scaling,
            faults=plan.faults,
            seed=plan.seed,
            resume=True,
        ),
    )


def goodput(outcomes: Sequence[RequestOutcome], slo: Slo, duration_s: float) -> float:
    """Requests per second that finished within the SLO."""
    done = [outcome for outcome in outcomes if not math.isnan(outcome.finished_s)]
    return sum(meets_slo(outcome, slo) for outcome in done) / duration_s


def waves(
    duration_s: float, low: float, high: float, num_prompt: int, num_output: int, seed: int = 0
) -> list[SimulatedRequest]:
    """Poisson arrivals whose rate goes from `low` to `high` and back, twice."""
    rng, at_s, requests = np.random.default_rng(seed), 0.0, list[SimulatedRequest]()
    while True:
        at_s += float(rng.exponential(1 / high))
        if at_s >= duration_s:
            return requests
        rate = low + (high - low) * math.sin(2 * math.pi * at_s / duration_s) ** 2
        if rng.random() < rate / high:
            isl = int(num_prompt * rng.uniform(0.5, 1.5))
            osl = max(2, int(num_output * rng.uniform(0.5, 1.5)))
            requests.append(SimulatedRequest(at_s=at_s, num_prompt=isl, num_output=osl))
