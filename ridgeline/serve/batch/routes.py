"""`/v1/files` and `/v1/batches`: read, ask the store, word the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.batch.records import Batch, StoredFile
from ridgeline.serve.batch.responses import batch_object, file_object, new_batch, page, read_create
from ridgeline.serve.batch.store import Store
from ridgeline.serve.batch.uploads import check_room, receive_file
from ridgeline.serve.batch.worker import Worker
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.event_stream import encode, read_body

MAX_CREATE_BYTES, BODY_TIMEOUT_S = 64 << 10, 30.0  # of a request to create a batch
MAX_PAGE = {"files": 10_000, "batches": 100}
IGNORED_HEADER = "x-ridgeline-ignored-fields"
Listed = TypeVar("Listed", Batch, StoredFile)


class BatchRoutes:
    """The routes over one store; `endpoints` are those that lines may name."""

    def __init__(
        self,
        store: Store,
        worker: Worker,
        endpoints: tuple[str, ...],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._worker, self._endpoints = store, worker, endpoints
        self._clock = clock

    def add_to(self, app: Starlette) -> None:
        for method, path, handler in (
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files", self.files),
            ("GET", "/v1/files/{file_id}", self.file),
            ("DELETE", "/v1/files/{file_id}", self.delete_file),
            ("GET", "/v1/files/{file_id}/content", self.content),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", self.batches),
            ("GET", "/v1/batches/{batch_id}", self.batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self.cancel),
        ):
            app.add_route(path, handler, methods=[method])

    # -- files

    async def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        tenant = caller_of(request.scope).name
        file = await receive_file(request, self._store, self._clock(), tenant)
        return _json(file_object(file))

    async def files(self, request: Request) -> Response:
        """GET /v1/files?purpose&after&limit&order."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order must be asc or desc", param="order")
        limit = _limit(request, "files")
        found = await asyncio.to_thread(
            self._store.files.page,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=limit + 1,
            newest_first=order == "desc",
            tenant=_seen_by(request),
        )
        return _page(found, limit, file_object)

    async def file(self, request: Request) -> Response:
        """GET /v1/files/ID."""
        return _json(file_object(await self._file(request)))

    async def delete_file(self, request: Request) -> Response:
        """DELETE /v1/files/ID."""
        file = await self._file(request)
        if not await asyncio.to_thread(self._store.files.delete, file):
            message = "a batch still reads this file; fix: wait for it, or cancel it"
            raise ApiError(409, message, param="file_id")
        return _json({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """GET /v1/files/ID/content."""
        file = await self._file(request)
        pieces = _in_thread(self._store.files.content(file))
        return StreamingResponse(pieces, media_type="application/octet-stream")

    # -- batches

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        asked, ignored = read_create(await read_body(request, MAX_CREATE_BYTES, BODY_TIMEOUT_S))
        new = new_batch(asked, self._endpoints, caller_of(request.scope).name)
        await asyncio.to_thread(check_room, self._store)
        file = await asyncio.to_thread(self._store.files.get, new.input_file_id)
        if file is None or file.purpose != "batch" or not _may_see(request, file):
            message = "input_file_id names no file that was uploaded with purpose batch"
            raise ApiError(400, message, param="input_file_id")
        batch = await asyncio.to_thread(self._store.create, new)
        self._worker.wake()
        return _json(batch_object(batch), ignored)

    async def batches(self, request: Request) -> Response:
        """GET /v1/batches?after&limit."""
        limit = _limit(request, "batches", default=20)
        after = request.query_params.get("after")
        found = await asyncio.to_thread(
            self._store.page, after=after, limit=limit + 1, tenant=_seen_by(request)
        )
        return _page(found, limit, batch_object)

    async def batch(self, request: Request) -> Response:
        """GET /v1/batches/ID."""
        return _json(batch_object(await self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/ID/cancel."""
        batch = await self._batch(request)
        moved = await asyncio.to_thread(self._store.cancel, batch.id)
        batch = await self._batch(request)
        if not moved and batch.status not in ("cancelling", "cancelled"):
            raise ApiError(409, f"a batch that is {batch.status} cannot be cancelled")
        self._worker.wake()
        return _json(batch_object(batch))

    async def _file(self, request: Request) -> StoredFile:
        file = await asyncio.to_thread(self._store.files.get, request.path_params["file_id"])
        if file is None or not _may_see(request, file):
            raise ApiError(404, "no such file", param="file_id")
        return file

    async def _batch(self, request: Request) -> Batch:
        batch = await asyncio.to_thread(self._store.get, request.path_params["batch_id"])
        if batch is None or not _may_see(request, batch):
            raise ApiError(404, "no such batch", param="batch_id")
        return batch


def _seen_by(request: Request) -> str | None:
    """Whose files and batches a request may see: its key's; None is everybody's."""
    caller = caller_of(request.scope)
    return None if caller.admin else caller.name


def _may_see(request: Request, thing: Batch | StoredFile) -> bool:
    return _seen_by(request) in (None, thing.tenant)


def _limit(request: Request, what: str, default: int | None = None) -> int:
    most = MAX_PAGE[what]
    text = request.query_params.get("limit")
    if text is None:
        return most if default is None else default
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and 1 <= int(text) <= most):
        raise ApiError(400, f"limit is out of range; limit: 1 to {most}", param="limit")
    return int(text)


def _page(found: list[Listed], limit: int, word: Callable[[Listed], dict[str, Any]]) -> Response:
    return _json(page([word(each) for each in found[:limit]], has_more=len(found) > limit))


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _json(payload: object, ignored: list[str] | None = None) -> Response:
    headers = None
    if ignored:
        named = ",".join(name.encode("ascii", "replace").decode() for name in ignored)
        headers = {IGNORED_HEADER: "".join(c for c in named if c.isprintable())[:1000]}
    return Response(encode(payload), media_type="application/json", headers=headers)
