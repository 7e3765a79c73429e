"""The backends of a gateway: which are ready, their models, and their load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Literal

import msgspec

from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.canary.rollout import Arm
from ridgeline.fleet.crashes.blame import Blame
from ridgeline.fleet.crashes.verdicts import Verdicts
from ridgeline.fleet.upstream import BackendAddress, BackendLost, Headers, UpstreamPool
from ridgeline.routing.base import FleetLoad, Router
from ridgeline.serve.generation.resume import INSTANCE_HEADER

log = logging.getLogger("ridgeline.fleet")

BackendState = Literal["starting", "ready", "draining", "down"]
BackendRole = Literal["whole", "prefill", "decode"]
_MAX_PROBE_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 2.0
_MAX_LATE_PROBES = 3
_FAST_PROBE_S = 0.2  # while a backend is not ready


class _ModelCard(msgspec.Struct):
    id: str


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard] = []


class Backend:
    """One server. `id` is its place in the fleet's loads; `arm` the version that it runs.

    A `prefill` server computes prompts for the `decode` servers.
    """

    def __init__(
        self,
        backend_id: int,
        address: BackendAddress,
        arm: Arm = "stable",
        *,
        role: BackendRole = "whole",
    ) -> None:
        self.id, self.address, self.arm, self.role = backend_id, address, arm, role
        self.pool = UpstreamPool(address)
        self.state: BackendState = "starting"
        self.models: tuple[str, ...] = ()
        self.num_suspects = self.num_late_probes = 0
        self.is_removed = False
        self.probe_now = asyncio.Event()

    def serves(self, model: str | None) -> bool:
        return model is None or not self.models or model in self.models


class Backends:
    """All backends of a gateway, and the policy that chooses among them.

    `probe_interval_s`: time between two questions whether a backend is ready. `headers` go with
    them. `silence_s`: time without a byte of a response after which its backend is asked whether it
    is alive. `canaries` run another version, and get only calls that are meant for it while
    `has_arms`. `on_ready` is called when a backend becomes ready; `on_start` is work that runs
    as long as the gateway.
    """

    def __init__(
        self,
        addresses: Sequence[BackendAddress],
        router: Router,
        *,
        probe_interval_s: float = 1.0,
        silence_s: float = 5.0,
        headers: Headers | None = None,
        canaries: Sequence[BackendAddress] = (),
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.load, self._router = FleetLoad(), router
        self.verdicts = Verdicts(Blame())
        self.all = [Backend(self.load.add_replica(), address) for address in addresses]
        self.all += [Backend(self.load.add_replica(), a, "canary") for a in canaries]
        self.has_arms, self.has_prefill = bool(canaries), False
        self._probe_interval_s, self._headers = probe_interval_s, headers or []
        self._silence_s = silence_s
        self.on_ready = on_ready
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[int, asyncio.Task[None]] = {}
        self.on_start: list[Callable[[], Coroutine[None, None, None]]] = []
        self.clock: Callable[[], float] = time.monotonic
        self.waiting: dict[object, float] = {}  # turns without a first byte: sent when, by `clock`

    def add(self, addresses: Sequence[BackendAddress], role: BackendRole) -> None:
        """Backends with a role, before the start. Those that compute prompts for others get whole
        requests only when no other one is ready."""
        self.all += [Backend(self.load.add_replica(), own, role=role) for own in addresses]
        self.has_prefill |= role == "prefill" and bool(addresses)

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that a backend serves."""
        backends = [backend for backend in self.all if not backend.is_removed]
        return tuple(dict.fromkeys(model for backend in backends for model in backend.models))

    def choose(self, call: RoutedCall) -> Backend | None:
        """A ready backend for the call; None if there is none now.

        A call that was on a backend when it crashed is a suspect, and goes to a backend that has no
        other: if that one crashes too, it is known why. With `trial` alone, it waits for one.
        """
        ready = self.ready_for(call)
        if self.has_prefill:
            ready = [b for b in ready if b.role != "prefill"] or ready
        if self.has_arms:
            stable = [b for b in ready if b.arm == "stable"]
            own = [b for b in ready if b.arm == call.arm and b.id not in call.excluded]
            ready = own or stable  # a canary that fails a request has lost it
        candidates = [b for b in ready if b.id not in call.excluded] or ready
        if call.trial != "none":
            apart = [b for b in candidates if not b.num_suspects]
            candidates = apart or ([] if call.trial == "alone" else candidates)
        if not candidates:
            return None
        return self.all[self._router.choose(call, [b.id for b in candidates], self.load)]

    def ready_for(self, call: RoutedCall) -> list[Backend]:
        """The backends that could serve the call now."""
        return [b for b in self.all if b.state == "ready" and b.serves(call.model)]

    def choose_prefill(self, call: RoutedCall, tried: set[int]) -> Backend | None:
        """A ready server to compute the prompt; None if there is none that was not tried."""
        ready = [
            b.id
            for b in self.all
            if b.role == "prefill"
            and b.state == "ready"
            and b.serves(call.model)
            and b.id not in tried
        ]
        return self.all[self._router.choose(call, ready, self.load)] if ready else None

    def serves(self, model: str | None) -> bool:
        """Whether any backend serves the model, or might: one that never answered may."""
        known = [backend for backend in self.all if not backend.is_removed]
        return any(backend.serves(model) for backend in known) or not known

    def mark_down(self, backend: Backend, why: str) -> None:
        """The backend broke a connection: nothing goes to it until it says that it is ready."""
        if backend.is_removed:
            return
        if backend.state != "down":
            log.warning("backend %s is down: %s", backend.address, why)
        backend.state = "down"
        backend.pool.close()
        backend.probe_now.set()

    def mark_draining(self, backend: Backend) -> None:
        """The backend refuses new requests."""
        if backend.state == "ready":
            backend.state = "draining"
        backend.probe_now.set()

    async def start(self) -> None:
        """Begin to ask the backends whether they are ready."""
        for backend in self.all:
            if not backend.is_removed:
                self._begin_watch(backend)
        self._tasks.append(asyncio.create_task(self._watch_silence()))
        self._tasks += [asyncio.create_task(work()) for work in self.on_start]

    def replace(self, addresses: Sequence[BackendAddress]) -> None:
        """Route to these backends from now on, canaries apart. Requests that run on another one
        may end there."""
        stable = {b.address: b for b in self.all if b.arm == "stable" and b.role == "whole"}
        for address in addresses:
            if address not in stable:
                backend = Backend(self.load.add_replica(), address)
                self.all.append(backend)
                self._begin_watch(backend)
            elif stable[address].is_removed:
                stable[address].is_removed = False
                stable[address].state = "starting"
                self._begin_watch(stable[address])
        for address, backend in stable.items():
            if address not in addresses and not backend.is_removed:
                log.info("backend %s is removed", address)
                backend.is_removed, backend.state = True, "draining"
                if backend.id in self._watches:
                    self._watches.pop(backend.id).cancel()
                self.verdicts.forget(backend.id)
                backend.pool.close()

    def _begin_watch(self, backend: Backend) -> None:
        self._watches[backend.id] = asyncio.create_task(self._watch(backend))

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self.all:
            backend.pool.close()

    async def is_alive(self, backend: Backend, timeout_s: float) -> bool:
        """Whether the backend answers `/health` in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(backend, b"/health") is not None
        except (BackendLost, TimeoutError):
            return False

    async def _watch_silence(self) -> None:
        """Break the connections of backends that neither send nor answer."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._silence_s / 4)
            for backend in self.all:
                silent_s = loop.time() - self._silence_s
                silent = [c for c in backend.pool.busy if c.last_byte_s < silent_s]
                if silent and not await self.is_alive(backend, 1.0):
                    self.mark_down(backend, f"no byte for {self._silence_s:g} s")
                    for connection in silent:
                        connection.close()

    async def _watch(self, backend: Backend) -> None:
        while True:
            try:
                await self._probe(backend)
            except Exception:
                log.exception("the probe of %s failed", backend.address)
            ready = backend.state == "ready"
            pause_s = self._probe_interval_s if ready else _FAST_PROBE_S
            backend.probe_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await backend.probe_now.wait()
            if not ready:  # asked again at once, a process that starts would be asked in a loop
                await asyncio.sleep(min(pause_s, 0.05))

    async def _probe(self, backend: Backend) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                status, _, instance = await self._ask(backend, b"/ready")
                if status == 404:  # not Ridgeline
                    status, _, instance = await self._ask(backend, b"/health")
                is_ready = status == 200
                if is_ready or instance is not None:
                    now_s = asyncio.get_running_loop().time()
                    self.verdicts.note_instance(backend.id, instance, now_s)
                if is_ready and backend.state != "ready":
                    backend.models = await self._models(backend)
        except TimeoutError:  # a server that computes may answer late once
            backend.num_late_probes += 1
            if backend.num_late_probes >= _MAX_LATE_PROBES:
                self.mark_down(backend, "it does not answer")
            return
        except BackendLost as lost:
            if lost.is_refusal:
                self.verdicts.note_refused(backend.id, asyncio.get_running_loop().time())
            if backend.state in ("ready", "draining"):
                self.mark_down(backend, str(lost))
            return
        backend.num_late_probes = 0
        if is_ready and backend.state != "ready":
            log.info("backend %s is ready", backend.address)
            backend.state = "ready"
            self.on_ready()
        elif not is_ready and backend.state == "ready":
            backend.state = "draining"

    async def _models(self, backend: Backend) -> tuple[str, ...]:
        body = await self._get(backend, b"/v1/models")
        try:
            cards = msgspec.json.decode(body or b"{}", type=_ModelCards)
        except msgspec.DecodeError:
            return ()
        return tuple(card.id for card in cards.data)

    async def _get(self, backend: Backend, path: bytes) -> bytes | None:
        """The body of a page; None for an error."""
        status, body, _ = await self._ask(backend, path)
        return body if status == 200 else None

    async def _ask(self, backend: Backend, path: bytes) -> tuple[int, bytes, bytes | None]:
        """Status and body of a page, and the id of the process that answered, if it tells."""
        connection = await backend.pool.exchange(b"GET", path, self._headers)
        try:
            instance = dict(connection.headers).get(INSTANCE_HEADER.encode())
            return connection.status, await connection.read_all(_MAX_PROBE_BYTES), instance
        finally:
            backend.pool.release(connection)
