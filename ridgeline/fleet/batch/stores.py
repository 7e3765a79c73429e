"""The batch stores of a fleet: which one has a file or a batch, and the servers that open it.

A file and everything made of it stay in the store that it was uploaded to. Ids are those of the
servers: an id that is not known yet is looked up in every store, so a gateway that was restarted,
or another one, finds it too. Nothing is said to be missing while a store cannot be asked.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal

import msgspec

from ridgeline.fleet.backends import Backend, Backends
from ridgeline.fleet.upstream import BackendLost, Headers, UpstreamConnection
from ridgeline.serve.errors import ApiError

Kind = Literal["files", "batches"]
Stores = Mapping[str, Sequence[Backend]]
_ID = re.compile(r"[\w-]{1,200}", re.ASCII)
MAX_KNOWN_IDS = 65_536
MAX_PAGE_BYTES = 64 << 20
_LOOK_UP_S = 10.0
_RETRY_AFTER = {"retry-after": "5"}


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a server with a store; `target`: its path and query, as they were sent."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes = b""

    @property
    def only_reads(self) -> bool:
        return self.method == b"GET"


class BatchStores:
    """Finds the stores of `backends`, by what those say of themselves in their probes."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._owners: OrderedDict[str, str] = OrderedDict()  # id → store
        self._num_placed = 0

    def all(self) -> dict[str, list[Backend]]:
        """The servers of every store. ApiError if there is none."""
        found: dict[str, list[Backend]] = {}
        for backend in self._eligible():
            if backend.batches.store:
                found.setdefault(backend.batches.store, []).append(backend)
        if not found:
            unknown = self.unknown()
            if unknown:
                message = f"no server with a batch store is known yet; not ready: {unknown}"
                raise ApiError(503, message, headers=_RETRY_AFTER)
            message = "no server behind this gateway has a batch store"
            raise ApiError(404, f"{message}; fix: ridgeline serve --batch-store FILE")
        return found

    def unknown(self) -> str:
        """Servers that may have a store, and have not been ready since the gateway started."""
        return ", ".join(
            str(backend.address)
            for backend in self._eligible()
            if not (backend.is_available or backend.batches.store or backend.models)
        )

    def _eligible(self) -> list[Backend]:
        return [
            backend
            for backend in self._backends.all
            if not backend.is_removed and backend.arm == "stable" and backend.role != "prefill"
        ]

    def place(self, model: str | None) -> list[Backend]:
        """The servers of the store that gets a new file: of those that serve the model, the one
        that needs the fewest servers for what it has. ApiError if none does."""
        ready = {
            store: able
            for store, servers in self.all().items()
            if (able := [b for b in servers if b.is_available and b.serves(model)])
        }
        if not ready:
            known = [b for servers in self.all().values() for b in servers]
            if model is not None and not any(backend.serves(model) for backend in known):
                message = f"no server with a batch store serves the model `{model[:200]}`"
                raise ApiError(404, message, param="model")
            raise self.not_ready("that takes files", known)
        self._num_placed += 1
        order = sorted(ready)
        turn = self._num_placed % len(order)
        return min(
            (ready[store] for store in (*order[turn:], *order[:turn])),
            key=lambda servers: max(backend.batches.servers for backend in servers),
        )

    async def owner(self, kind: Kind, item_id: str, headers: Headers) -> Sequence[Backend]:
        """The servers of the store with the file or batch. ApiError 404 if no store has it, 503 if
        one could not be asked."""
        stores, noun = self.all(), "file" if kind == "files" else "batch"
        if not _ID.fullmatch(item_id):
            raise ApiError(404, f"no such {noun}", param=f"{noun}_id")
        known = stores.get(self._owners.get(item_id, ""))
        if known is not None:
            return known
        path = f"/v1/{kind}/{item_id}".encode()
        request = StoreRequest(method=b"GET", target=path, headers=headers)
        statuses = await asyncio.gather(
            *[self._status(servers, request) for servers in stores.values()]
        )
        silent: list[str] = []
        for (store, servers), status in zip(stores.items(), statuses, strict=True):
            if status == 200:
                self.remember(item_id, store)
                return servers
            if status is None or status >= 500:
                silent += [str(backend.address) for backend in servers]
        for status in statuses:
            if status in (401, 403):
                raise ApiError(status, "a server refuses the API key of the request")
        if silent or self.unknown():
            names = ", ".join(filter(None, (*silent, self.unknown())))
            message = f"no server that is ready has it, and these could not be asked: {names}"
            raise ApiError(503, message, headers=_RETRY_AFTER)
        raise ApiError(404, f"no such {noun}", param=f"{noun}_id")

    def remember(self, item_id: str, store: str) -> None:
        """The store has what is called that."""
        self._owners[item_id] = store
        if len(self._owners) > MAX_KNOWN_IDS:
            self._owners.popitem(last=False)

    async def _status(self, servers: Sequence[Backend], request: StoreRequest) -> int | None:
        """With which status a store answers; None if no server of it could."""
        try:
            async with asyncio.timeout(_LOOK_UP_S):
                return (await self.read(servers, request))[0]
        except (ApiError, TimeoutError):
            return None

    async def read(self, servers: Sequence[Backend], request: StoreRequest) -> tuple[int, bytes]:
        """Status and body of a page of a store. ApiError 503 if no server answers."""
        backend, connection = await self.send(servers, request)
        try:
            return connection.status, await connection.read_all(MAX_PAGE_BYTES)
        except BackendLost as lost:
            self._backends.note_lost(backend, lost)
            raise self.not_ready("that has it", servers) from None
        finally:
            backend.pool.release(connection)

    async def send(
        self,
        servers: Sequence[Backend],
        request: StoreRequest,
        body: AsyncIterator[bytes] | None = None,
    ) -> tuple[Backend, UpstreamConnection]:
        """Send a request to a server of a store, and wait for the headers of its response. `body`:
        in pieces, instead of that of the request.

        ApiError 503 if none is ready, 502 if one broke off that may have done what was asked.
        """
        for backend in self._in_order(servers, only_reads=request.only_reads):
            try:
                if request.only_reads:
                    get = backend.pool.exchange(b"GET", request.target, request.headers)
                    return backend, await get
                pieces = _whole(request.body) if body is None else body
                head = (request.method, request.target, request.headers)
                return backend, await backend.pool.upload(*head, pieces)
            except BackendLost as lost:
                self._backends.note_lost(backend, lost)
                if not (request.only_reads or lost.is_refusal):
                    message = (
                        f"{backend.address} broke off; whether it did what was asked is not known: "
                        "see the list"
                    )
                    raise ApiError(502, message) from None
        raise self.not_ready("that has it", servers)

    def _in_order(self, servers: Sequence[Backend], *, only_reads: bool) -> list[Backend]:
        """The servers that may be asked, the best first; one that is stopping still reads."""
        states = ["ready", "late", *(["draining"] if only_reads else [])]
        load = self._backends.load.in_flight
        able = [backend for backend in servers if backend.state in states]
        return sorted(able, key=lambda b: (states.index(b.state), load[b.id]))

    def not_ready(self, which: str, servers: Sequence[Backend]) -> ApiError:
        names = ", ".join(str(backend.address) for backend in servers)
        message = f"the server {which} is not ready: {names}; its batches go on when it is back"
        return ApiError(503, message, headers=_RETRY_AFTER)


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body
