"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from starlette.responses import StreamingResponse

from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.batch.records import BatchJob, StoredFile
from ridgeline.serve.batch.schemas import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    batch_object,
    file_object,
    to_new_batch,
)
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.uploads import check_room, receive_file
from ridgeline.serve.batch.worker import BatchWorker
from ridgeline.serve.bodies.routing import JsonRoute
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.respond import ignored_fields_header, json_response
from ridgeline.serve.openapi import error_responses

router = APIRouter(tags=["Batch"], route_class=JsonRoute)

_MAX_FILES_PER_PAGE, _MAX_BATCHES_PER_PAGE = 10_000, 100
_ID = "$response.body#/id"

T = TypeVar("T")


@dataclass(frozen=True)
class BatchService:
    """What the routes share; in `app.state.batches`. `endpoints`: those that batches may use."""

    store: BatchStore
    worker: BatchWorker
    endpoints: tuple[str, ...]
    clock: Callable[[], float] = time.time


async def get_batches(request: Request) -> BatchService:
    batches: BatchService = request.app.state.batches
    return batches


BatchesDep = Annotated[BatchService, Depends(get_batches)]
FileId = Annotated[str, Path(min_length=1)]
BatchId = Annotated[str, Path(min_length=1)]


async def get_file(file_id: FileId, request: Request, batches: BatchesDep) -> StoredFile:
    """The file of the path; ApiError 404 if the caller has no such file."""
    file = await asyncio.to_thread(batches.store.files.get, file_id)
    if file is None or not _owns(request, file):
        raise ApiError(404, "no such file", param="file_id")
    return file


async def get_batch_or_404(batch_id: BatchId, request: Request, batches: BatchesDep) -> BatchJob:
    """The batch of the path; ApiError 404 if the caller has no such batch."""
    batch = await asyncio.to_thread(batches.store.get, batch_id)
    if batch is None or not _owns(request, batch):
        raise ApiError(404, "no such batch", param="batch_id")
    return batch


FileDep = Annotated[StoredFile, Depends(get_file)]
BatchDep = Annotated[BatchJob, Depends(get_batch_or_404)]


def _link(operation_id: str, parameter: str) -> dict[str, Any]:
    """An OpenAPI link: the id of this response as a path parameter of another operation."""
    return {"operationId": operation_id, "parameters": {parameter: _ID}}


_UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "contentMediaType": "application/octet-stream",
                            "description": "JSON lines, at most 200 MiB and 50,000 of them",
                        },
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 2_592_000,
                        },
                    },
                }
            }
        },
    }
}
_UPLOAD_LINKS = {
    name: _link(name, "file_id") for name in ("get_file", "delete_file", "get_file_content")
} | {"create_batch": {"operationId": "create_batch", "requestBody": {"input_file_id": _ID}}}
_BATCH_LINKS = {name: _link(name, "batch_id") for name in ("get_batch", "cancel_batch")}


@router.post(
    "/v1/files",
    summary="Upload an input file",
    operation_id="upload_file",
    response_model=FileObject,
    responses=error_responses(400, 408, 413, 415, 507) | {200: {"links": _UPLOAD_LINKS}},
    openapi_extra=_UPLOAD_BODY,
)
async def upload_file(request: Request, batches: BatchesDep) -> Response:
    tenant = caller_of(request.scope).name
    file = await receive_file(request, batches.store, batches.clock(), tenant)
    return json_response(file_object(file))


@router.get(
    "/v1/files",
    summary="List files",
    operation_id="list_files",
    response_model=FileList,
    responses=error_responses(400),
)
async def list_files(
    request: Request,
    batches: BatchesDep,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=_MAX_FILES_PER_PAGE)] = _MAX_FILES_PER_PAGE,
    after: str | None = None,
) -> Response:
    files = await asyncio.to_thread(
        batches.store.files.page,
        purpose=purpose,
        after=after,
        limit=limit + 1,
        newest_first=order == "desc",
        tenant=_tenant_filter(request),
    )
    return await asyncio.to_thread(_page, files, file_object, limit)


@router.get(
    "/v1/files/{file_id}",
    summary="Describe a file",
    operation_id="get_file",
    response_model=FileObject,
    responses=error_responses(404),
)
async def describe_file(file: FileDep) -> Response:
    return json_response(file_object(file))


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file",
    operation_id="delete_file",
    response_model=FileDeleted,
    responses=error_responses(404, 409),
)
async def delete_file(file: FileDep, batches: BatchesDep) -> Response:
    if not await asyncio.to_thread(batches.store.files.delete, file):
        message = "an unfinished batch reads this file; fix: wait for it, or cancel it"
        raise ApiError(409, message, param="file_id")
    deleted: FileDeleted = {"id": file.id, "object": "file", "deleted": True}
    return json_response(deleted)


@router.get(
    "/v1/files/{file_id}/content",
    summary="Download a file",
    operation_id="get_file_content",
    response_class=Response,
    responses=error_responses(404)
    | {200: {"content": {"application/octet-stream": {"schema": {}}}}},
)
async def get_file_content(file: FileDep, batches: BatchesDep) -> Response:
    pieces = _iterate_in_thread(batches.store.files.content(file))
    return StreamingResponse(pieces, media_type="application/octet-stream")


@router.post(
    "/v1/batches",
    summary="Create a batch",
    operation_id="create_batch",
    response_model=BatchObject,
    responses=error_responses(400, 408, 413, 507) | {200: {"links": _BATCH_LINKS}},
)
async def create_batch(body: CreateBatchRequest, request: Request, batches: BatchesDep) -> Response:
    new = to_new_batch(body, batches.endpoints, caller_of(request.scope).name)
    await asyncio.to_thread(check_room, batches.store)
    file = await asyncio.to_thread(batches.store.files.get, new.input_file_id)
    if file is None or file.purpose != "batch" or not _owns(request, file):
        message = "input_file_id names no file that was uploaded with purpose batch"
        raise ApiError(400, message, param="input_file_id")
    batch = await asyncio.to_thread(batches.store.create, new)
    batches.worker.wake()
    return json_response(batch_object(batch), ignored_fields_header(sorted(body.model_extra or {})))


@router.get(
    "/v1/batches",
    summary="List batches, newest first",
    operation_id="list_batches",
    response_model=BatchList,
    responses=error_responses(400),
)
async def list_batches(
    request: Request,
    batches: BatchesDep,
    limit: Annotated[int, Query(ge=1, le=_MAX_BATCHES_PER_PAGE)] = 20,
    after: str | None = None,
) -> Response:
    page = await asyncio.to_thread(
        batches.store.page, after=after, limit=limit + 1, tenant=_tenant_filter(request)
    )
    return await asyncio.to_thread(_page, page, batch_object, limit)


@router.get(
    "/v1/batches/{batch_id}",
    summary="Describe a batch",
    operation_id="get_batch",
    response_model=BatchObject,
    responses=error_responses(404) | {200: {"links": {"get_batch": _BATCH_LINKS["get_batch"]}}},
)
async def describe_batch(batch: BatchDep) -> Response:
    return json_response(batch_object(batch))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch",
    operation_id="cancel_batch",
    response_model=BatchObject,
    responses=error_responses(404, 409)
    | {200: {"links": {"get_batch": _BATCH_LINKS["get_batch"]}}},
)
async def cancel_batch(batch: BatchDep, batches: BatchesDep) -> Response:
    is_cancelled = await asyncio.to_thread(batches.store.cancel, batch.id)
    current = await asyncio.to_thread(batches.store.get, batch.id)
    assert current is not None
    if not is_cancelled and current.status not in ("cancelling", "cancelled"):
        raise ApiError(409, f"a batch that is {current.status} cannot be cancelled")
    batches.worker.wake()
    return json_response(batch_object(current))


def _tenant_filter(request: Request) -> str | None:
    """Whose files and batches a caller may see: its own, or all (None) for an administrator."""
    caller = caller_of(request.scope)
    return None if caller.admin else caller.name


def _owns(request: Request, item: BatchJob | StoredFile) -> bool:
    return _tenant_filter(request) in (None, item.tenant)


def _page(found: Sequence[T], to_object: Callable[[T], Any], limit: int) -> Response:
    """A list of up to `limit` objects, as OpenAI's clients page through it."""
    items = [to_object(item) for item in found[:limit]]
    return json_response(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": len(found) > limit,
        }
    )


async def _iterate_in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
