"""How files and batches read in OpenAI's JSON, and what a `POST /v1/batches` may say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ridgeline.serve.batch.records import Batch, NewBatch, StoredFile
from ridgeline.serve.batch.worker import seconds_of
from ridgeline.serve.errors import ApiError

MAX_WINDOW_S = 30 * 86_400
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
_STAMPS = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip


class _ExpiresAfter(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(msgspec.Struct):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


def read_create(raw: bytes) -> tuple[CreateBatch, list[str]]:
    """The body, and the names of its fields that mean nothing here."""
    try:
        asked = msgspec.json.decode(raw, type=CreateBatch)
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is not a batch: {error}") from None
    return asked, sorted(set(given) - set(CreateBatch.__struct_fields__))


def new_batch(asked: CreateBatch, endpoints: tuple[str, ...], tenant: str) -> NewBatch:
    """What was asked for, checked; ApiError 400 that names the field."""
    if asked.endpoint not in endpoints:
        message = f"endpoint is not served in batches; limit: {', '.join(endpoints)}"
        raise ApiError(400, message, param="endpoint")
    window_s = seconds_of(asked.completion_window)
    if window_s is None or window_s > MAX_WINDOW_S:
        message = "completion_window is not understood; fix: send e.g. 24h (at most 30d)"
        raise ApiError(400, message, param="completion_window")
    _check_metadata(asked.metadata or {})
    expiry = asked.output_expires_after
    if expiry is not None and not 3600 <= expiry.seconds <= 2_592_000:
        message = "output_expires_after.seconds is out of range; limit: 3600 to 2592000"
        raise ApiError(400, message, param="output_expires_after")
    return NewBatch(
        input_file_id=asked.input_file_id,
        endpoint=asked.endpoint,
        completion_window=asked.completion_window,
        window_s=window_s,
        metadata=asked.metadata,
        output_expires_after_s=None if expiry is None else expiry.seconds,
        tenant=tenant,
    )


def _check_metadata(metadata: dict[str, str]) -> None:
    long = [k for k, v in metadata.items() if len(k) > MAX_KEY or len(v) > MAX_VALUE]
    if len(metadata) > MAX_METADATA or long:
        limit = f"{MAX_METADATA} pairs, keys of {MAX_KEY}, values of {MAX_VALUE} characters"
        raise ApiError(400, f"metadata is too large; limit: {limit}", param="metadata")


def file_object(file: StoredFile) -> dict[str, Any]:
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


def batch_object(batch: Batch) -> dict[str, Any]:
    errors = None
    if batch.errors is not None:
        errors = {"object": "list", "data": msgspec.to_builtins(batch.errors)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: getattr(batch, name) for name in _STAMPS},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
        "usage": _usage(batch),
        "charge": _charge(batch),
    }


def _usage(batch: Batch) -> dict[str, Any]:
    return {
        "input_tokens": batch.prompt_tokens,
        "input_tokens_details": {"cached_tokens": batch.cached_tokens},
        "output_tokens": batch.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": batch.prompt_tokens + batch.completion_tokens,
    }


def _charge(batch: Batch) -> dict[str, float]:
    """Tokens at the price of online ones: what the batch costs in their currency."""
    return {
        "price_factor": batch.price_factor,
        "input_tokens": batch.prompt_tokens * batch.price_factor,
        "output_tokens": batch.completion_tokens * batch.price_factor,
    }


def page(objects: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A list as OpenAI's clients page through it."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }
