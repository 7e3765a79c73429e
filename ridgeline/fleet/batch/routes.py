"""`/v1/files` and `/v1/batches` of a gateway: every request goes to the store that has the thing.

    POST /v1/files           streamed to a server that serves the model of the file's first line
    POST /v1/batches         to the store with the input file
    GET  /v1/files, batches  the lists of all stores as one
    the rest                 to the store with the file or batch

A store whose servers are gone keeps its batches, which go on when one of them is back; until then
the answer is 503 and names them. A download that breaks off goes on with the next byte.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from ridgeline.errors import DECODE_ERRORS
from ridgeline.fleet.backends import Backend, Backends
from ridgeline.fleet.batch.lists import ListQuery, merged_list
from ridgeline.fleet.batch.stores import BatchStores, Kind, StoreRequest
from ridgeline.fleet.client_side import ClientResponse, read_request_body
from ridgeline.fleet.upstream import BackendLost, Headers, UpstreamConnection
from ridgeline.serve.errors import ApiError, ClientDisconnected
from ridgeline.serve.generation.disconnect import cancel_on_disconnect

_PATH = re.compile(r"/v1/(files|batches)(?:/([^/]+)(?:/(content|cancel))?)?")
_ROUTES = {
    ("GET", "files", False, None),
    ("GET", "files", True, None),
    ("DELETE", "files", True, None),
    ("GET", "files", True, "content"),
    ("GET", "batches", False, None),
    ("POST", "batches", False, None),
    ("GET", "batches", True, None),
    ("POST", "batches", True, "cancel"),
}
INCOMPLETE_HEADER = b"x-ridgeline-not-listed"
"""Of a list: servers that may have more, and were not ready since the gateway started."""
_NAME = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){1,500}")')
_MAX_SEARCHED_BYTES = 256 << 10
_MAX_CREATE_BYTES = 1 << 20
_MAX_PARTS_OF_DOWNLOAD = 8
_HOP_HEADERS = {
    *(b"host", b"content-length", b"connection", b"keep-alive", b"transfer-encoding", b"te"),
    *(b"upgrade", b"expect", b"proxy-connection", b"trailer", b"accept-encoding", b"range"),
}
_KEPT_BACK = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"}


def is_batch_path(path: str) -> bool:
    """Whether the path is one of files or batches."""
    return _PATH.fullmatch(path) is not None


class _Created(msgspec.Struct):
    id: str


class _NewBatch(msgspec.Struct):
    input_file_id: str


class BatchRoutes:
    """Answers requests for files and batches over the stores of `backends`."""

    def __init__(self, backends: Backends) -> None:
        self._stores = BatchStores(backends)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose path is one of files or batches. Raises ApiError before the
        response has begun."""
        match = _PATH.fullmatch(scope["path"])
        assert match is not None
        kind, item_id, action = cast("tuple[Kind, str | None, str | None]", match.groups())
        response = ClientResponse(scope["path"], send)
        if (scope["method"], kind, item_id, action) == ("POST", "files", None, None):
            await self._upload(scope, receive, response)
            return
        if (scope["method"], kind, item_id is not None, action) not in _ROUTES:
            raise ApiError(405, f"{scope['method']} is not supported here")
        body = await read_request_body(receive, _MAX_CREATE_BYTES)
        request = _request(scope, body)
        async with cancel_on_disconnect(receive):
            if item_id is not None:
                servers = await self._stores.owner(kind, item_id, request.headers)
            elif request.only_reads:
                await self._list(kind, scope, request, response)
                return
            else:
                servers = await self._servers_of_input(request)
            await self._pass(servers, request, response)

    async def _list(
        self, kind: Kind, scope: Scope, request: StoreRequest, response: ClientResponse
    ) -> None:
        stores = self._stores.all()
        fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        query, unknown = ListQuery.parse(kind, fields), self._stores.unknown()
        if (len(stores) == 1 and not unknown) or query is None:  # the server says what is wrong
            await self._pass(next(iter(stores.values())), request, response)
            return
        body = await merged_list(self._stores, query, request.headers)
        headers = [(b"content-type", b"application/json")]
        if unknown:
            headers.append((INCOMPLETE_HEADER, unknown.encode()))
        await response.whole(200, headers, body)

    async def _servers_of_input(self, request: StoreRequest) -> Sequence[Backend]:
        """Those of the store with the batch's input file; any store says what is wrong with a
        body that names none."""
        try:
            file_id = msgspec.json.decode(request.body, type=_NewBatch).input_file_id
        except (msgspec.DecodeError, RecursionError):
            file_id = ""
        try:
            return await self._stores.owner("files", file_id, request.headers)
        except ApiError as error:
            if error.status_code != 404:
                raise
            return next(iter(self._stores.all().values()))

    async def _upload(self, scope: Scope, receive: Receive, response: ClientResponse) -> None:
        pieces, model = await _find_model(_pieces(receive))
        servers = self._stores.place(model)
        request = _request(scope, b"")
        backend, connection = await self._stores.send(servers, request, pieces)
        try:
            body = await _read_created(backend, connection)
        finally:
            backend.pool.discard(connection)
        self._remember(backend, connection.status, body)
        await response.whole(connection.status, _passed_headers(connection, whole=True), body)

    async def _pass(
        self, servers: Sequence[Backend], request: StoreRequest, response: ClientResponse
    ) -> None:
        """Pass a request on, and its response back."""
        backend, connection = await self._stores.send(servers, request)
        if not request.only_reads:
            try:
                body = await _read_created(backend, connection)
            finally:
                backend.pool.discard(connection)
            self._remember(backend, connection.status, body)
            await response.whole(connection.status, _passed_headers(connection, whole=True), body)
            return
        await self._download(servers, request, response, (backend, connection))

    async def _download(
        self,
        servers: Sequence[Backend],
        request: StoreRequest,
        response: ClientResponse,
        begun: tuple[Backend, UpstreamConnection],
    ) -> None:
        """Relay a response that only reads; where it breaks off, the next server goes on."""
        num_sent, (backend, connection) = 0, begun
        status = connection.status
        await response.start(status, _passed_headers(connection))
        for _ in range(_MAX_PARTS_OF_DOWNLOAD):
            try:
                num_skipped = 0
                while data := await connection.read():
                    rest = data[max(0, num_sent - num_skipped) :]
                    num_skipped += len(data) - len(rest)
                    num_sent, num_skipped = num_sent + len(rest), num_skipped + len(rest)
                    if rest and not response.write(rest):
                        await response.drain()
                await response.end()
                return
            except BackendLost:
                pass
            finally:
                backend.pool.release(connection)
            try:
                backend, connection = await self._stores.send(servers, request)
            except ApiError as error:  # too late for a response of its own
                raise BackendLost(error.message, has_begun=True) from None
            if connection.status != status:
                backend.pool.discard(connection)
                raise BackendLost("another server answers the rest differently", has_begun=True)
        raise BackendLost(f"a download broke off {_MAX_PARTS_OF_DOWNLOAD} times", has_begun=True)

    def _remember(self, backend: Backend, status: int, body: bytes) -> None:
        """What a server has created is in its store."""
        if status == 200:
            try:
                created = msgspec.json.decode(body, type=_Created)
            except DECODE_ERRORS:
                return
            self._stores.remember(created.id, backend.batches.store)


async def _read_created(backend: Backend, connection: UpstreamConnection) -> bytes:
    try:
        return await connection.read_all(_MAX_CREATE_BYTES)
    except BackendLost:
        message = f"{backend.address} broke off; whether it did what was asked is not known"
        raise ApiError(502, f"{message}: see the list") from None


def _request(scope: Scope, body: bytes) -> StoreRequest:
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = [pair for pair in scope["headers"] if pair[0] not in _HOP_HEADERS]
    method = scope["method"].encode()
    return StoreRequest(method=method, target=target, headers=headers, body=body)


def _passed_headers(connection: UpstreamConnection, *, whole: bool = False) -> Headers:
    left_out = {*_KEPT_BACK, b"content-length"} if whole else _KEPT_BACK
    return [pair for pair in connection.headers if pair[0] not in left_out]


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The body of a request as it comes."""
    has_more = True
    while has_more:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        has_more = message.get("more_body", False)
        if data := message.get("body", b""):
            yield data


async def _find_model(body: AsyncIterator[bytes]) -> tuple[AsyncIterator[bytes], str | None]:
    """The same body, and the model that the first line of its file names."""
    head = b""
    async for data in body:
        head += data
        if (found := _NAME.search(head)) is not None:
            return _joined(head, body), _text(found[1])
        if len(head) >= _MAX_SEARCHED_BYTES:
            break
    return _joined(head, body), None


def _text(quoted: bytes) -> str | None:
    try:
        return msgspec.json.decode(quoted, type=str)
    except DECODE_ERRORS:
        return None


async def _joined(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if head:
        yield head
    async for data in rest:
        yield data
