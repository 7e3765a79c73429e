"""Errors as an OpenAI client expects them: `{"error": {"message", "type", "param", "code"}}`.

Types and statuses are vLLM's. A message never carries a stack trace, a path of this machine, or an
address of this process.
"""

from __future__ import annotations

import re

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ridgeline.errors import EngineUnavailable, UserError
from ridgeline.records import Sampling

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "BadRequestError",
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

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        self.status, self.message, self.param = status, message, param
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


def response(error: ApiError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(body(error), status_code=error.status, headers=headers)


async def handle(_request: Request, error: Exception) -> JSONResponse:
    """Exception handler of the app: every exception becomes a body a client can read."""
    if isinstance(error, HTTPException):
        return response(ApiError(error.status_code, str(error.detail)))
    if isinstance(error, ClientGone):
        return response(ApiError(499, "the client closed the connection"))
    return response(as_api_error(error))


def _param(error: UserError) -> str | None:
    """The field a `UserError` opens with: `temperature is out of range` is about temperature."""
    word = error.what.split(maxsplit=1)[0].partition("[")[0]
    return word if word in _FIELDS else None
