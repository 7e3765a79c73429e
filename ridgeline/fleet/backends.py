"""The backends of a gateway: which are ready, their models, and their load.

Each backend is asked again and again whether it is ready, and its answer may take its time:

    ready, draining   it says that it is ready, or not
    late              nothing came from it for `silence_s`, although it was asked
    down              it refused or reset a connection, or nothing came for DOWN_S

Any byte that comes from it counts, also that of a stream. A late backend gets what no ready one can
take, so that servers which are only slow fail no request; its silent streams continue elsewhere,
where another one is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Literal

import msgspec

from ridgeline.errors import DECODE_ERRORS
from ridgeline.fleet.call import RoutedCall
from ridgeline.fleet.canary.rollout import Arm
from ridgeline.fleet.crashes.blame import Blame
from ridgeline.fleet.crashes.verdicts import Verdicts
from ridgeline.fleet.running_clock import RunningClock
from ridgeline.fleet.upstream import BackendAddress, BackendLost, Headers, UpstreamPool
from ridgeline.routing.base import FleetLoad, Router
from ridgeline.serve.generation.resume import BATCH_HEADER, INSTANCE_HEADER

log = logging.getLogger("ridgeline.fleet")

BackendState = Literal["starting", "ready", "late", "draining", "down"]
BackendRole = Literal["whole", "prefill", "decode"]
DOWN_S = 30.0  # of silence, or six times `silence_s`, if that is more
_MAX_PROBE_BYTES = 1 << 20
_FAST_PROBE_S = 0.2  # while a backend is not ready


class _ModelCard(msgspec.Struct):
    id: str


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard] = []


class BatchDemand(msgspec.Struct, frozen=True):
    """Servers that the open requests of a batch store need to end in time, as one of those that
    work on it says."""

    store: str = ""
    servers: float = 0.0

    @staticmethod
    def parse(header: bytes | None) -> BatchDemand:
        """From `STORE=SERVERS`; the empty demand for any other header."""
        store, _, text = (header or b"").decode("latin-1").partition("=")
        try:
            servers = float(text)
        except ValueError:
            return BatchDemand()
        return BatchDemand(store, servers) if 0 <= servers < math.inf else BatchDemand()


class Backend:
    """One server. `id` is its place in the fleet's loads; `arm` the version that it runs.

    A `prefill` server computes prompts for the `decode` servers. `is_ridgeline`: whether it has
    the pages of a server of Ridgeline, as far as known. `asked_s`: when the first question
    was sent that it has not answered; None if it has answered all.
    """

    def __init__(
        self,
        backend_id: int,
        address: BackendAddress,
        arm: Arm = "stable",
        *,
        role: BackendRole = "whole",
        clock: Callable[[], float],
    ) -> None:
        self.id, self.address, self.arm, self.role = backend_id, address, arm, role
        self.pool, self.probes = UpstreamPool(address, clock), UpstreamPool(address, clock)
        self.state: BackendState = "starting"
        self.is_ridgeline = True
        self.models: tuple[str, ...] = ()
        self.num_suspects = 0
        self.batches = BatchDemand()
        self.asked_s: float | None = None
        self.is_removed = self.is_reported = False
        self.probe_now = asyncio.Event()

    @property
    def is_available(self) -> bool:
        """Whether it may get requests."""
        return self.state in ("ready", "late")

    def serves(self, model: str | None) -> bool:
        return model is None or not self.models or model in self.models

    def silent_for_s(self, now_s: float) -> float:
        """For how long nothing has come from it although it was asked."""
        if self.asked_s is None:
            return 0.0
        return now_s - max(self.asked_s, self.pool.heard_s, self.probes.heard_s)

    def close(self) -> None:
        """Close the idle connections."""
        self.pool.close()
        self.probes.close()


class Backends:
    """All backends of a gateway, and the policy that chooses among them.

    `probe_interval_s`: time between two questions whether a backend is ready. `headers` go with
    them. `silence_s`: time without a byte from a backend that was asked, after which it is late;
    `stall_s`: time without a byte of a stream that has begun, after which it is given up.
    `canaries` run another version, and get only calls that are meant for it while
    `has_arms`. `on_start` is work that runs as long as the gateway.
    """

    def __init__(
        self,
        addresses: Sequence[BackendAddress],
        router: Router,
        *,
        probe_interval_s: float = 1.0,
        silence_s: float = 5.0,
        stall_s: float = 60.0,
        headers: Headers | None = None,
        canaries: Sequence[BackendAddress] = (),
    ) -> None:
        self.load, self._router, self.clock = FleetLoad(), router, RunningClock()
        self.verdicts = Verdicts(Blame())
        self.all = [self.make(address) for address in addresses]
        self.all += [self.make(address, "canary") for address in canaries]
        self.has_arms, self.has_prefill = bool(canaries), False
        self._probe_interval_s, self._headers = probe_interval_s, headers or []
        self._silence_s, self.stall_s = silence_s, stall_s
        self.on_ready: Callable[[], None] = lambda: None  # a backend has become ready
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[int, asyncio.Task[None]] = {}
        self.on_start: list[Callable[[], Coroutine[None, None, None]]] = []
        # turns without a first byte: the backend's id, and when it was sent, by `clock`
        self.waiting: dict[object, tuple[int, float]] = {}

    def make(
        self, address: BackendAddress, arm: Arm = "stable", role: BackendRole = "whole"
    ) -> Backend:
        """A backend with a place in the fleet's loads, which gets no requests yet."""
        return Backend(self.load.add_replica(), address, arm, role=role, clock=self.clock)

    def add(self, addresses: Sequence[BackendAddress], role: BackendRole) -> None:
        """Backends with a role, before the start. Those that compute prompts for others get whole
        requests only when no other one is ready."""
        self.all += [self.make(address, role=role) for address in addresses]
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
        """The backends that could serve the call now: late ones if no other can. Only Ridgeline
        continues a stream."""
        able = [b for b in self.all if b.is_available and b.serves(call.model)]
        if call.relay.is_bound:
            able = [b for b in able if b.is_ridgeline]
        return [b for b in able if b.state == "ready"] or able

    def choose_prefill(self, call: RoutedCall, tried: set[int], decoder: Backend) -> Backend | None:
        """A ready server to compute the prompt for `decoder`, of its kind; None if there is none
        that was not tried."""
        ready = [
            b.id
            for b in self.all
            if b.role == "prefill"
            and b.state == "ready"
            and b.serves(call.model)
            and b.is_ridgeline == decoder.is_ridgeline
            and b.id not in tried
        ]
        return self.all[self._router.choose(call, ready, self.load)] if ready else None

    def serves(self, model: str | None) -> bool:
        """Whether any backend serves the model, or might: one that never answered may."""
        known = [backend for backend in self.all if not backend.is_removed]
        return any(backend.serves(model) for backend in known) or not known

    def note_lost(self, backend: Backend, lost: BackendLost) -> None:
        """A request has lost its connection to the backend."""
        if lost.is_late:
            self._mark_late(backend, str(lost))
        else:
            self._mark_down(backend, str(lost))

    def _mark_late(self, backend: Backend, why: str) -> None:
        """Nothing goes to the backend as long as another one is ready."""
        if backend.state == "ready":
            log.warning("backend %s is late: %s", backend.address, why)
            backend.state = "late"
            backend.probe_now.set()

    def _mark_down(self, backend: Backend, why: str) -> None:
        """The backend broke a connection: nothing goes to it until it says that it is ready."""
        if backend.is_removed:
            return
        if backend.state != "down":
            log.warning("backend %s is down: %s", backend.address, why)
        backend.state = "down"
        backend.close()
        backend.probe_now.set()

    def mark_draining(self, backend: Backend) -> None:
        """The backend refuses new requests."""
        if backend.is_available:
            backend.state = "draining"
        backend.probe_now.set()

    async def start(self) -> None:
        """Begin to ask the backends whether they are ready."""
        for backend in self.all:
            if not backend.is_removed:
                self._begin_watch(backend)
        self._tasks.append(asyncio.create_task(self.clock.tick()))
        self._tasks.append(asyncio.create_task(self._watch_silence()))
        self._tasks += [asyncio.create_task(work()) for work in self.on_start]

    def replace(self, addresses: Sequence[BackendAddress]) -> None:
        """Route to these backends from now on, canaries apart. Requests that run on another one
        may end there."""
        stable = {b.address: b for b in self.all if b.arm == "stable" and b.role == "whole"}
        for address in addresses:
            if address not in stable:
                backend = self.make(address)
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
                self.verdicts.forget(backend.id)
                backend.pool.close()

    def _begin_watch(self, backend: Backend) -> None:
        if backend.id not in self._watches:  # that of a removed one goes on while it has streams
            self._watches[backend.id] = asyncio.create_task(self._watch(backend))
        backend.probe_now.set()

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self.all:
            backend.close()

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / 4)
            for backend in self.all:
                self._check_silence(backend, self.clock())

    def _check_silence(self, backend: Backend, now_s: float) -> None:
        """Give up silent connections to a backend from which nothing comes: those that another one
        can continue, and in the end all."""
        silent_s = backend.silent_for_s(now_s)
        if silent_s < self._silence_s:
            return
        is_over = silent_s >= max(DOWN_S, 6 * self._silence_s)
        if is_over:
            self._mark_down(backend, f"no byte for {silent_s:.0f} s")
            backend.asked_s = now_s
        else:
            self._mark_late(backend, f"no byte for {silent_s:.0f} s")
        if is_over or self._has_other(backend):
            for connection in list(backend.pool.busy):
                patience_s = self._silence_s * connection.patience
                if is_over or now_s - connection.last_byte_s >= patience_s:
                    connection.give_up("it is silent")
        if is_over:
            for connection in list(backend.probes.busy):
                connection.give_up("it is silent")

    def _has_other(self, backend: Backend) -> bool:
        """Whether another backend is ready for what this one serves."""
        return any(
            other is not backend
            and other.state == "ready"
            and (not backend.models or all(map(other.serves, backend.models)))
            for other in self.all
        )

    async def _watch(self, backend: Backend) -> None:
        while not backend.is_removed or backend.pool.busy:
            try:
                await self._probe(backend)
            except Exception:
                log.exception("the probe of %s failed", backend.address)
            ready = backend.state == "ready"
            is_fast = not ready and not backend.is_removed
            pause_s = _FAST_PROBE_S if is_fast else self._probe_interval_s
            backend.probe_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await backend.probe_now.wait()
            if not ready:  # asked again at once, a process that starts would be asked in a loop
                await asyncio.sleep(min(pause_s, 0.05))
        del self._watches[backend.id]
        backend.close()

    async def _probe(self, backend: Backend) -> None:
        """Ask the backend whether it is ready, for as long as that takes."""
        if backend.asked_s is None:
            backend.asked_s = self.clock()
        try:
            is_ready = await self._is_ready(backend)
        except BackendLost as lost:
            now_s = self.clock()
            if lost.is_late:
                self._mark_late(backend, str(lost))
                return
            backend.asked_s = None
            if lost.is_refusal:
                self.verdicts.note_refused(backend.id, now_s)
            if backend.state in ("ready", "late", "draining"):
                self._mark_down(backend, str(lost))
            elif backend.state == "starting":
                self._report(backend, f"does not answer yet: {lost}")
            return
        backend.asked_s = None
        if backend.is_removed:
            return
        if is_ready and backend.state != "ready":
            log.info("backend %s is ready", backend.address)
            backend.state = "ready"
            self.on_ready()
        elif not is_ready and backend.is_available:
            backend.state = "draining"

    def _report(self, backend: Backend, what: str) -> None:
        """Say once why it is not ready: it may only be starting, or its URL be wrong."""
        if not backend.is_reported:
            backend.is_reported = True
            log.warning("backend %s %s", backend.address, what)

    async def _is_ready(self, backend: Backend) -> bool:
        """The backend's answer. Raises BackendLost."""
        status, _, headers = await self._ask(backend, b"/ready")
        backend.is_ridgeline = status != 404
        if not backend.is_ridgeline:
            status, _, headers = await self._ask(backend, b"/health")
        if status not in (200, 503):
            self._report(backend, f"is no server of an OpenAI API: /health answers {status}")
        is_ready, instance = status == 200, headers.get(INSTANCE_HEADER.encode())
        backend.batches = BatchDemand.parse(headers.get(BATCH_HEADER.encode()))
        if (is_ready or instance is not None) and not backend.is_removed:
            now_s = self.clock()
            self.verdicts.note_instance(backend.id, instance, now_s)
        if is_ready and not backend.is_available and not backend.is_removed:
            backend.models = await self._models(backend)
        return is_ready

    async def _models(self, backend: Backend) -> tuple[str, ...]:
        body = await self._get(backend, b"/v1/models")
        try:
            cards = msgspec.json.decode(body or b"{}", type=_ModelCards)
        except DECODE_ERRORS:
            return ()
        return tuple(card.id for card in cards.data)

    async def _get(self, backend: Backend, path: bytes) -> bytes | None:
        """The body of a page; None for an error."""
        status, body, _ = await self._ask(backend, path)
        return body if status == 200 else None

    async def _ask(self, backend: Backend, path: bytes) -> tuple[int, bytes, dict[bytes, bytes]]:
        """Status, body and headers of a page."""
        connection = await backend.probes.exchange(b"GET", path, self._headers)
        try:
            headers = dict(connection.headers)
            return connection.status, await connection.read_all(_MAX_PROBE_BYTES), headers
        finally:
            backend.probes.release(connection)
