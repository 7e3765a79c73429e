"""From a submitted request to its HTTP response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request, Response

from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.collect import CollectedChoice, collect
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.event_stream import EventSerializer, EventStreamResponse, to_json
from ridgeline.serve.generation.handover import run_handover
from ridgeline.serve.generation.resume import ResumableSerializer
from ridgeline.serve.generation.stream import ResponseStream

IGNORED_HEADER = "x-ridgeline-ignored-fields"
_MAX_IGNORED_CHARS = 1000
_MAX_REQUEST_ID_CHARS = 200


class ResponseSerializer(EventSerializer, Protocol):
    """The wire format of one endpoint."""

    def body(self, choices: Sequence[CollectedChoice]) -> Mapping[str, Any]:
        """The JSON body of a response that is not streamed."""
        ...


async def respond(
    request: Request, stream: ResponseStream, serializer: ResponseSerializer, *, streamed: bool
) -> Response:
    """The response to a generation, which is aborted if the client disconnects before its end."""
    if stream.request.handover is not None:
        handle = await run_handover(stream, stream.request.handover)
        return json_response(handle, stream.request.headers)
    if streamed and stream.request.is_resumable:
        resumable = ResumableSerializer(serializer, stream.request.resume, stream.note_migration)
        return EventStreamResponse(stream, resumable, stream.request.headers)
    if streamed:
        return EventStreamResponse(stream, serializer, stream.request.headers)
    async with cancel_on_disconnect(request.receive):
        choices = await collect(stream)
    sampling = stream.request.sampling
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        return json_response(serializer.body(choices), stream.request.headers)
    # Thousands of log-probabilities take seconds to write: a thread lets others run in between.
    body = await asyncio.to_thread(lambda: to_json(serializer.body(choices)))
    return Response(body, media_type="application/json", headers=stream.request.headers)


def json_response(payload: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(payload), media_type="application/json", headers=headers)


def response_headers(request_id: str, ignored: Sequence[str]) -> dict[str, str]:
    """The request's id, and the names of the fields that had no effect."""
    return {"x-request-id": request_id} | ignored_fields_header(ignored)


def ignored_fields_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names fields without effect; empty for none."""
    return {IGNORED_HEADER: _printable(",".join(names))[:_MAX_IGNORED_CHARS]} if names else {}


def request_id(headers: Mapping[str, str], field: str | None, default: str) -> str:
    """The client's id for the request, from the header or the body; else `default`.

    ApiError 400 for an id that is too long or not printable ASCII.
    """
    given = headers.get("x-request-id") or field
    if given is None:
        return default
    if given != _printable(given)[:_MAX_REQUEST_ID_CHARS]:
        raise ApiError(
            400,
            f"the request id must be printable ASCII of at most {_MAX_REQUEST_ID_CHARS} characters",
        )
    return given


def _printable(text: str) -> str:
    ascii_text = text.encode("ascii", "replace").decode()
    return "".join(character for character in ascii_text if character.isprintable())
