"""Errors as an OpenAI client expects them: `{"error": {"message", "type", "param", "code"}}`.

Types and statuses are vLLM's. A message never carries a stack trace, a path of this machine, or an
address of this process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match

from ridgeline.errors import EngineFull, EngineUnavailable, UserError
from ridgeline.records import Failed, Sampling

TYPES = {
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
}

_FIELDS = {"prompt", "messages", *(field.name for field in msgspec.structs.fields(Sampling))}
_PATH = re.compile(r"(?<![\w/.:])(?:~|/)(?:[\w.@+-]+/)+[\w.@+-]*")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class ApiError(Exception):
    """An answer other than 200, raised anywhere below a route."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.param = status, message, param
        self.headers = dict(headers or {})
        super().__init__(message)


class ClientGone(Exception):  # an event, not a fault
    """The client hung up; there is nobody left to answer."""


def scrub(message: str) -> str:
    """The message without paths of this machine and addresses of this process."""
    return _ADDRESS.sub("<address>", _PATH.sub("<path>", message))


def as_api_error(error: BaseException) -> ApiError:
    """What a client may be told about `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, scrub(str(error)), param=_param(error))
    if isinstance(error, EngineFull):
        after = {"retry-after": str(math.ceil(error.retry_after_s))}
        return ApiError(503, scrub(str(error)), headers=after)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, scrub(str(error)) or "the engine is not available")
    return ApiError(500, "the server failed on this request; its log says why")


def body(error: ApiError) -> dict[str, object]:
    """The error body of the OpenAI API."""
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(error.status, "InternalServerError"),
            "param": error.param,
            "code": error.status,
        }
    }


_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_body(error: ApiError) -> dict[str, object]:
    """The error body of Anthropic's API."""
    kind = _ANTHROPIC.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def of_failure(failed: Failed) -> ApiError:
    """What a client may be told about a request that ended in `Failed`."""
    if failed.cause == "deadline":
        return ApiError(408, "the answer was not ready by the time given in timeout_ms")
    return ApiError(400 if failed.cause == "request" else 500, scrub(failed.error))


def response(error: ApiError, path: str = "") -> JSONResponse:
    """The answer that tells an error, in the words of the API that `path` belongs to."""
    headers = {"retry-after": "1"} if error.status == 503 else {}
    told = anthropic_body(error) if path.startswith("/v1/messages") else body(error)
    return JSONResponse(told, status_code=error.status, headers=headers | error.headers)


async def handle(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of the app: every exception becomes a body a client can read."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {}) | _allow(request, error.status_code)
        told = ApiError(error.status_code, str(error.detail), headers=headers)
    elif isinstance(error, ClientGone):
        told = ApiError(499, "the client closed the connection")
    else:
        told = as_api_error(error)
    return response(told, request.scope.get("path", ""))


def _allow(request: Request, status: int) -> dict[str, str]:
    """The router's own 405 lists the methods of the first route of a path; this lists all."""
    if status != 405:
        return {}
    fitting = [r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE]
    methods: set[str] = set().union(*(getattr(route, "methods", None) or () for route in fitting))
    return {"Allow": ", ".join(sorted(methods))}


def _param(error: UserError) -> str | None:
    """The field a `UserError` opens with: `temperature is out of range` is about temperature."""
    word = error.what.split(maxsplit=1)[0].partition("[")[0]
    return word if word in _FIELDS else None
