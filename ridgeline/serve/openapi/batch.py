"""Files and batches in `/openapi.json`: their bodies, their answers, and how one leads to another.

The links say where an id of one answer goes in the next request, so that a client that only knows
the document (or a fuzzer) gets from an upload to the results.
"""

from __future__ import annotations

from typing import Any

from ridgeline.serve.batch.records import STATUSES
from ridgeline.serve.openapi.components import (
    errors,
    json_answer,
    operation,
    path_parameter,
    query_parameter,
)
from ridgeline.serve.openapi.response_schemas import (
    ANY_TEXT,
    COUNT,
    NUMBER,
    TEXT,
    USAGE_IN_OUT,
    Schema,
    list_of,
    nullable,
    object_of,
    ref,
)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""What the lines of a batch may be sent to, where the server has it."""

_INSTANT: Schema = {"type": ["integer", "null"], "minimum": 0}
_FILE = object_of(
    {
        "id": TEXT,
        "object": {"const": "file"},
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": _INSTANT,
        "filename": TEXT,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"const": "processed"},
        "status_details": {"type": "null"},
    }
)
_COMPLAINT = object_of(
    {"code": TEXT, "message": TEXT, "param": ANY_TEXT, "line": {"type": ["integer", "null"]}}
)
_BATCH = object_of(
    {
        "id": TEXT,
        "object": {"const": "batch"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "model": ANY_TEXT,
        "errors": nullable(object_of({"object": {"const": "list"}, "data": list_of(_COMPLAINT)})),
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": {"enum": list(STATUSES)},
        "output_file_id": ANY_TEXT,
        "error_file_id": ANY_TEXT,
        "created_at": COUNT,
        "expires_at": COUNT,
        **{
            f"{state}_at": _INSTANT
            for state in (
                "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
                "cancelled",
            )
        },
        "request_counts": object_of({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        "metadata": nullable({"type": "object", "additionalProperties": TEXT}),
        "usage": USAGE_IN_OUT,
        "charge": object_of(
            {"price_factor": NUMBER, "input_tokens": NUMBER, "output_tokens": NUMBER}
        ),
    }
)  # fmt: skip


def _page(name: str) -> Schema:
    return object_of(
        {
            "object": {"const": "list"},
            "data": list_of(ref(name)),
            "first_id": ANY_TEXT,
            "last_id": ANY_TEXT,
            "has_more": {"type": "boolean"},
        }
    )


_WINDOW: Schema = {
    **TEXT,
    "pattern": "^[1-9][0-9]{0,4}[mhd]$",
    "description": "minutes, hours or days, at most 30 days",
    "examples": ["24h"],
}
_EXPIRES: dict[str, Schema] = {
    "expires_after[anchor]": {"const": "created_at"},
    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
}
BATCH_REQUESTS: dict[str, Schema] = {
    "UploadRequest": object_of(
        {
            "file": {
                **TEXT,
                "format": "binary",
                "contentMediaType": "application/octet-stream",
                "description": "JSON lines, at most 200 MiB and 50,000 of them",
            },
            "purpose": {"const": "batch"},
        },
        **_EXPIRES,
    ),
    "CreateBatchRequest": object_of(
        {
            "input_file_id": TEXT,
            "endpoint": {"enum": list(ENDPOINTS)},
            "completion_window": _WINDOW,
        },
        metadata=nullable(
            {
                "type": "object",
                "maxProperties": 16,
                "propertyNames": {"maxLength": 64},
                "additionalProperties": {**TEXT, "maxLength": 512},
            }
        ),
        output_expires_after=nullable(
            object_of(
                {
                    "anchor": {"const": "created_at"},
                    "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
                }
            )
        ),
    ),
}
BATCH_ANSWERS: dict[str, Schema] = {
    "File": _FILE,
    "FileList": _page("File"),
    "FileDeleted": object_of({"id": TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": _BATCH,
    "BatchList": _page("Batch"),
}
_ID = "$response.body#/id"
_AFTER = query_parameter("after", TEXT)


def batch_paths() -> dict[str, Any]:
    """The nine routes."""
    return {
        "/v1/files": {"post": _upload(), "get": _list_files()},
        "/v1/files/{file_id}": {"get": _of_file("file", "File"), "delete": _delete()},
        "/v1/files/{file_id}/content": {"get": _content()},
        "/v1/batches": {"post": _create(), "get": _list_batches()},
        "/v1/batches/{batch_id}": {"get": _of_batch("batch", errors(404))},
        "/v1/batches/{batch_id}/cancel": {"post": _of_batch("cancel_batch", errors(404, 409))},
    }


def _upload() -> Schema:
    told = json_answer("File")
    create = {"operationId": "create_batch", "requestBody": {"input_file_id": _ID}}
    links = {name: _link(name, "file_id") for name in ("file", "delete_file", "file_content")}
    told["200"]["links"] = {**links, "create_batch": create}
    body = {"multipart/form-data": {"schema": ref("UploadRequest")}}
    found = operation("upload_file", told, errors(400, 408, 413))
    return {**found, "requestBody": {"required": True, "content": body}}


def _create() -> Schema:
    told = json_answer("Batch")
    links = {name: _link(name, "batch_id") for name in ("batch", "cancel_batch")}
    told["200"]["links"] = links
    body = {"application/json": {"schema": ref("CreateBatchRequest")}}
    found = operation("create_batch", told, errors(400, 408, 413))
    return {**found, "requestBody": {"required": True, "content": body}}


def _list_files() -> Schema:
    parameters = (
        query_parameter("purpose", TEXT),
        query_parameter("order", {"enum": ["asc", "desc"]}),
        _limit(10_000),
        _AFTER,
    )
    return operation("files", json_answer("FileList"), errors(400), *parameters)


def _list_batches() -> Schema:
    return operation("batches", json_answer("BatchList"), errors(400), _limit(100), _AFTER)


def _limit(most: int) -> Schema:
    return query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most})


def _of_file(name: str, answer: str, *statuses: int) -> Schema:
    return operation(name, json_answer(answer), errors(404, *statuses), path_parameter("file_id"))


def _delete() -> Schema:
    return _of_file("delete_file", "FileDeleted", 409)


def _content() -> Schema:
    content: Schema = {"application/octet-stream": {"schema": {}}}
    told: Schema = {"200": {"description": "the file", "content": content}}
    return operation("file_content", told, errors(404), path_parameter("file_id"))


def _of_batch(name: str, failures: dict[str, Any]) -> Schema:
    told = json_answer("Batch")
    told["200"]["links"] = {"batch": _link("batch", "batch_id")}
    return operation(name, told, failures, path_parameter("batch_id"))


def _link(name: str, parameter: str) -> Schema:
    return {"operationId": name, "parameters": {parameter: _ID}}
