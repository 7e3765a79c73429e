"""Error responses in the shapes of the OpenAI and Anthropic APIs.

Error types and statuses follow vLLM. A message never carries a stack trace, a file path of this
machine or a memory address.
"""

from __future__ import annotations

import errno
import math
import re
import sqlite3
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from ridgeline.errors import BadGrammar, EngineFull, EngineUnavailable, UserError
from ridgeline.records import Failed, Sampling
from ridgeline.serve.bodies.explain import MAX_STEPS, explain

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "BadRequestError",
    415: "BadRequestError",
    429: "RateLimitError",
    431: "BadRequestError",
    499: "ClientClosedRequest",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}
ANTHROPIC_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

_RESPONSES_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_FIELD_NAMES = {
    "/v1/chat/completions": {"prompt": "messages"},
    "/v1/messages": {
        "prompt": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
    },
    "/v1/messages/count_tokens": {"prompt": "messages"},
    "/v1/responses": _RESPONSES_NAMES,
    "/v1/responses/input_tokens": _RESPONSES_NAMES,
    "/v1/embeddings": {"prompt": "input"},
    "/v1/rerank": {"prompt": "documents"},
    "/v1/score": {"prompt": "text_2"},
}
"""How each API calls what this server calls otherwise."""
_SAME_AS = {"/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank", "/score": "/v1/score"}
_JSON_NAMES = {None: "null", True: "true", False: "false"}
_REQUEST_FIELDS = {"prompt", "messages", *(f.name for f in msgspec.structs.fields(Sampling))}
_FILE_PATH = re.compile(r"(?<![\w/.:])(?:~|/)(?:[\w.@+-]+/)+[\w.@+-]*")
_MEMORY_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class ErrorDetail(TypedDict):
    """What went wrong. `param` names the field of the request, if one is to blame."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(TypedDict):
    """Body of every error, as OpenAI's clients expect it."""

    error: ErrorDetail


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorResponse(TypedDict):
    """Body of every error of `/v1/messages`, as Anthropic's clients expect it."""

    type: str
    error: AnthropicErrorDetail


class ApiError(HTTPException):
    """An error response, raised anywhere below a route."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, dict(headers or {}))
        self.message, self.param = message, param


class ClientDisconnected(ApiError):
    """The client closed the connection; the response has no reader."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


def redact(message: str) -> str:
    """The message without file paths and memory addresses of this server."""
    return _MEMORY_ADDRESS.sub("<address>", _FILE_PATH.sub("<path>", message))


def to_api_error(error: BaseException) -> ApiError:
    """The error response for an exception; 500 without details for an unexpected one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, UserError):
        return ApiError(400, redact(str(error)), param=_field_named_by(error))
    if isinstance(error, EngineFull):
        retry_after = {"retry-after": str(math.ceil(error.retry_after_s))}
        return ApiError(503, redact(str(error)), headers=retry_after)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, redact(str(error)) or "the engine is not available")
    if _is_full_disk(error):
        return ApiError(507, "the disk of the batch store is full", headers={"retry-after": "60"})
    return ApiError(500, "the server failed on this request; see its log")


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def failure_error(failed: Failed) -> ApiError:
    """The error response for a request that ended in `Failed`."""
    if failed.cause == "deadline":
        return ApiError(408, "the response was not complete within timeout_ms")
    if failed.cause == "engine":  # a batch request waits, and a stream goes on elsewhere
        return ApiError(503, redact(failed.error))
    return ApiError(400 if failed.cause == "request" else 500, redact(failed.error))


def grammar_error(error: BadGrammar, field: str | None) -> ApiError:
    """The error response for structured output that was asked for in `field`."""
    return ApiError(400, redact(str(error)), param=field)


def error_body(error: ApiError) -> ErrorResponse:
    """The error in OpenAI's shape."""
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES.get(error.status_code, "InternalServerError"),
            "param": error.param,
            "code": error.status_code,
        }
    }


def anthropic_error_body(error: ApiError) -> AnthropicErrorResponse:
    """The error in Anthropic's shape."""
    kind = ANTHROPIC_ERROR_TYPES.get(error.status_code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: ApiError, path: str = "") -> JSONResponse:
    """The response for an error, in the shape of the API that `path` belongs to."""
    headers = {"retry-after": "1"} if error.status_code == 503 else {}
    is_anthropic = path.startswith("/v1/messages")
    body = anthropic_error_body(error) if is_anthropic else error_body(error)
    return JSONResponse(body, error.status_code, headers | dict(error.headers or {}))


def validation_error(errors: Sequence[Any], body: Any) -> ApiError:
    """400 for the most telling of pydantic's complaints, as one sentence that names the field.

    `errors`: as `ValidationError.errors()` lists them; `body`: what was validated.
    """
    if not errors[0]["loc"]:
        given = "it is empty" if errors[0]["type"] == "missing" else f"got {_shorten(body)}"
        return ApiError(400, f"the request body is not a JSON object: {given}")
    found = explain(errors, body)
    field = ".".join(map(str, found.path[:MAX_STEPS]))
    given = "" if found.is_missing else f"; got {_shorten(found.value)}"
    return ApiError(400, f"{field}: {found.message}{given}", param=field)


def in_words_of(path: str, error: ApiError) -> ApiError:
    """The error with the names that the API at `path` gives to fields."""
    path = path.rstrip("/")
    names = _FIELD_NAMES.get(_SAME_AS.get(path, path), {})
    name = names.get(error.param or "")
    if name is None or error.param is None:
        return error
    message = error.message
    if message.startswith(error.param):
        message = name + message.removeprefix(error.param)
    elif name not in message:
        message = f"{name}: {message}"
    return ApiError(error.status_code, message, param=name, headers=error.headers)


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """As `validation_error`, for a model that was validated outside a route."""
    listed = error.errors(include_url=False, include_input=True, include_context=False)
    return validation_error(listed, body)


def check_limit(name: str, number: int, limit: int, what: str) -> None:
    """ApiError 400 if a request has more than `limit` of something."""
    if number > limit:
        message = f"{name}: too many {what}: {number}; limit: {limit}; fix: send several requests"
        raise ApiError(400, message, param=name)


def _shorten(value: object) -> str:
    if value is None or isinstance(value, bool):
        return _JSON_NAMES[value]
    if isinstance(value, dict | list):  # the text of a million items would hold the event loop
        items = list(islice(value.items() if isinstance(value, dict) else value, 16))
        value = dict(items) if isinstance(value, dict) else items
    text = repr(value[:200] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _field_named_by(error: UserError) -> str | None:
    """The field that a message opens with: `temperature is out of range` names temperature."""
    if error.what.startswith("the prompt"):
        return "prompt"
    if error.what.startswith("a stop string"):
        return "stop"
    if error.what.startswith("a bad word"):
        return "bad_words"
    if error.what.startswith("beam search"):
        return "use_beam_search"
    word = error.what.split(maxsplit=1)[0].partition("[")[0]
    return word if word in _REQUEST_FIELDS else None
