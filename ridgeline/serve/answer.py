"""From a job to an HTTP answer, the same way for every voice: whole, or as server-sent events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.asks import Asks, Job, Update
from ridgeline.serve.choices import Tally, gather
from ridgeline.serve.requests import ChatRequest, CompletionRequest, ignored_fields
from ridgeline.serve.wire import EventStream, encode, sse, unless_gone

IGNORED_HEADER = "x-ridgeline-ignored-fields"


class Voice(Protocol):
    """How one endpoint words its answers."""

    answer_object: str
    chunk_object: str

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """One `choices` entry per chunk to send for this update."""
        ...

    def choices(self, tally: Tally) -> list[dict[str, Any]]: ...

    def extras(self, tally: Tally) -> dict[str, Any]: ...


class Envelope(msgspec.Struct, frozen=True):
    """What every JSON object of one answer repeats."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class UsageWanted(msgspec.Struct, frozen=True):
    """Where a stream tells its usage: in a last chunk, and in every chunk."""

    at_end: bool = False
    always: bool = False


async def answer(
    request: Request,
    asked: CompletionRequest | ChatRequest,
    job: Job,
    asks: Asks,
    voice: Voice,
    model: str,
) -> Response:
    """The response to `asked`; the job's asks are aborted if the client leaves before its end."""
    envelope = Envelope(job.id, int(time.time()), model)
    headers = _headers(asked, job)
    if not asked.stream:
        tally = await unless_gone(request.receive, gather(asks, job))
        payload = envelope.wrap(
            voice.answer_object, voice.choices(tally), usage=tally.usage(), **voice.extras(tally)
        )
        return Response(encode(payload), media_type="application/json", headers=headers)
    events = _stream(asks, Tally(job), voice, envelope, _usage_wanted(asked))
    await unless_gone(request.receive, _prime(events))
    return EventStream(events, headers)


async def _stream(
    asks: Asks, tally: Tally, voice: Voice, envelope: Envelope, wanted: UsageWanted
) -> AsyncGenerator[bytes, None]:
    """First nothing (the engine accepted the job: the headers may go), then one event per chunk."""
    kind = voice.chunk_object
    async with asks:
        await asks.started()
        yield b""
        async with contextlib.aclosing(asks.updates()) as updates:
            async for update in updates:
                tally.count(update)
                usage = {"usage": tally.usage()} if wanted.always else {}
                for entry in voice.chunks(update):
                    yield sse(envelope.wrap(kind, [entry], **usage))
        if wanted.at_end:
            yield sse(envelope.wrap(kind, [], usage=tally.usage()))


async def _prime(events: AsyncGenerator[bytes, None]) -> None:
    """Run a stream up to its first, empty event, so that a refusal still gets its own status."""
    await anext(events)


def _usage_wanted(asked: CompletionRequest | ChatRequest) -> UsageWanted:
    options = asked.stream_options
    if options is None:
        return UsageWanted()
    return UsageWanted(bool(options.include_usage), bool(options.continuous_usage_stats))


def _headers(asked: CompletionRequest | ChatRequest, job: Job) -> dict[str, str]:
    headers = {"x-request-id": job.id}
    ignored = ignored_fields(asked)
    if ignored:
        safe = ",".join(name.encode("ascii", "replace").decode() for name in ignored)
        headers[IGNORED_HEADER] = "".join(c for c in safe if c.isprintable())[:1000]
    return headers
