"""Files and batches in OpenAI's JSON, and the body of `POST /v1/batches`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import Field
from typing_extensions import TypedDict

from ridgeline.records import Usage
from ridgeline.serve.batch.records import BatchJob, BatchStatus, NewBatch, StoredFile
from ridgeline.serve.errors import ApiError
from ridgeline.serve.openai.objects import NonNegative, ResponseUsage, response_usage
from ridgeline.serve.openai.schemas import OpenBody

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]
BATCH_ENDPOINTS: tuple[str, ...] = get_args(BatchEndpoint)
"""Endpoints that batch requests may name."""
MAX_WINDOW_S = 30 * 86_400
EXPIRY_LIMITS_S = (3600, 2_592_000)
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512


class OutputExpiry(OpenBody):
    """When the output files expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[
        int, Field(json_schema_extra={"minimum": EXPIRY_LIMITS_S[0], "maximum": EXPIRY_LIMITS_S[1]})
    ]


class CreateBatchRequest(OpenBody):
    """Body of `POST /v1/batches`. `completion_window`: minutes, hours or days, at most 30 days."""

    input_file_id: str
    endpoint: Annotated[str, Field(json_schema_extra={"enum": list(BATCH_ENDPOINTS)})]
    completion_window: Annotated[
        str,
        Field(json_schema_extra={"pattern": "^[1-9][0-9]{0,4}[mhd]$", "examples": ["24h"]}),
    ]
    metadata: (
        Annotated[
            dict[str, str],
            Field(
                json_schema_extra={
                    "maxProperties": MAX_METADATA,
                    "propertyNames": {"maxLength": MAX_KEY_CHARS},
                    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
                }
            ),
        ]
        | None
    ) = None
    output_expires_after: OutputExpiry | None = None


class FileObject(TypedDict):
    """A file. Instants are Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: NonNegative
    created_at: NonNegative
    expires_at: NonNegative | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(TypedDict):
    """The id of the deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchInputError(TypedDict):
    """One error of an input file; `line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchInputErrors(TypedDict):
    """Why an input file was rejected."""

    object: Literal["list"]
    data: list[BatchInputError]


class BatchRequestCounts(TypedDict):
    """Requests of a batch."""

    total: NonNegative
    completed: NonNegative
    failed: NonNegative


class BatchCharge(TypedDict):
    """Tokens at the price of online ones."""

    price_factor: float
    input_tokens: float
    output_tokens: float


class BatchObject(TypedDict):
    """A batch. Instants are Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: BatchEndpoint
    model: str | None
    errors: BatchInputErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: NonNegative
    in_progress_at: NonNegative | None
    expires_at: NonNegative
    finalizing_at: NonNegative | None
    completed_at: NonNegative | None
    failed_at: NonNegative | None
    expired_at: NonNegative | None
    cancelling_at: NonNegative | None
    cancelled_at: NonNegative | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None
    usage: ResponseUsage
    charge: BatchCharge


class BatchList(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def to_new_batch(body: CreateBatchRequest, endpoints: tuple[str, ...], tenant: str) -> NewBatch:
    """The validated request; ApiError 400 that names the field."""
    if body.endpoint not in endpoints:
        message = f"endpoint is not available in batches; limit: {', '.join(endpoints)}"
        raise ApiError(400, message, param="endpoint")
    window_s = parse_window(body.completion_window)
    if window_s is None or window_s > MAX_WINDOW_S:
        message = "completion_window cannot be read; fix: send e.g. 24h (at most 30d)"
        raise ApiError(400, message, param="completion_window")
    metadata = body.metadata or {}
    too_long = [
        k for k, v in metadata.items() if len(k) > MAX_KEY_CHARS or len(v) > MAX_VALUE_CHARS
    ]
    if len(metadata) > MAX_METADATA or too_long:
        limit = (
            f"{MAX_METADATA} pairs, keys of {MAX_KEY_CHARS}, values of {MAX_VALUE_CHARS} characters"
        )
        raise ApiError(400, f"metadata is too large; limit: {limit}", param="metadata")
    expiry, (min_s, max_s) = body.output_expires_after, EXPIRY_LIMITS_S
    if expiry is not None and not min_s <= expiry.seconds <= max_s:
        message = f"output_expires_after.seconds is out of range; limit: {min_s} to {max_s}"
        raise ApiError(400, message, param="output_expires_after")
    return NewBatch(
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        window_s=window_s,
        metadata=body.metadata,
        output_expires_after_s=None if expiry is None else expiry.seconds,
        tenant=tenant,
    )


def parse_window(text: str) -> int | None:
    """`24h`, `90m`, `7d` in seconds; None if it cannot be read."""
    units = {"m": "minutes", "h": "hours", "d": "days"}
    if not text[:-1].isascii() or not text[:-1].isdecimal() or text[-1:] not in units:
        return None
    number = int(text[:-1]) if len(text) < 8 else 0
    return int(timedelta(**{units[text[-1]]: number}).total_seconds()) or None


def file_object(file: StoredFile) -> FileObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchJob) -> BatchObject:
    errors: BatchInputErrors | None = None
    if batch.errors is not None:
        errors = {"object": "list", "data": msgspec.to_builtins(batch.errors)}
    endpoint: Any = batch.endpoint
    usage = Usage(
        prompt_tokens=batch.prompt_tokens,
        cached_tokens=batch.cached_tokens,
        completion_tokens=batch.completion_tokens,
    )
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
        "usage": response_usage(usage),
        "charge": {
            "price_factor": batch.price_factor,
            "input_tokens": batch.prompt_tokens * batch.price_factor,
            "output_tokens": batch.completion_tokens * batch.price_factor,
        },
    }
