"""Prefill and decode on different servers: the field `kv_transfer_params` of a request.

    to a prefill server   {"do_remote_decode": true}: compute the prompt, and answer with the handle
                          of its KV blocks as soon as the request is queued
    to a decode server    the handle: {"do_remote_prefill": true, "remote_host": …, …}

Both are the body of one generation otherwise, so that either server validates it. A server without
the role ignores the field, and says so. A decode server computes what it cannot fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from ridgeline.errors import RidgelineError
from ridgeline.records import KvTransferParams
from ridgeline.serve.errors import ApiError

TRANSFER_FIELD = "kv_transfer_params"
TRANSFER_KEY = "ridgeline.kv_transfer"
"""Where a request's scope keeps its `KvTransferParams`."""


class Leases(Protocol):
    """The blocks that an engine hands out, as `Engine.transfers`."""

    def open_lease(self, prompt: Sequence[int]) -> KvTransferParams | None: ...

    def close_lease(self, lease_id: str) -> None: ...


class NoLeases:
    """No prompt is computed for another server."""

    def open_lease(self, prompt: Sequence[int]) -> KvTransferParams | None:
        return None

    def close_lease(self, lease_id: str) -> None:
        pass


class Handover(msgspec.Struct, frozen=True):
    """A prompt that is computed for another server. `cancel` lets go of its lease."""

    params: KvTransferParams
    cancel: Callable[[], None]


class SubmittedStream(Protocol):
    """A stream of updates, read by `run_handover` alone."""

    async def submit(self) -> None: ...

    def __aiter__(self) -> SubmittedStream: ...

    async def __anext__(self) -> object: ...

    def close(self) -> None: ...


_running: set[asyncio.Task[None]] = set()


async def run_handover(stream: SubmittedStream, handover: Handover) -> dict[str, object]:
    """Queue the prompt, and return the body of the response; computing goes on after it.

    Raises what the engine refuses the request with.
    """
    try:
        await stream.submit()
    except BaseException:
        handover.cancel()
        stream.close()
        raise
    task = asyncio.create_task(_read_to_end(stream, handover))
    _running.add(task)
    task.add_done_callback(_running.discard)
    return {TRANSFER_FIELD: msgspec.to_builtins(handover.params)}


async def _read_to_end(stream: SubmittedStream, handover: Handover) -> None:
    try:
        with suppress(ApiError, RidgelineError):
            async for _ in stream:
                pass
    except asyncio.CancelledError:
        handover.cancel()
        raise
    finally:
        stream.close()


def read_transfer_params(value: object) -> KvTransferParams | None:
    """The field of a body; ApiError 400 if it is malformed."""
    try:
        return msgspec.convert(value, KvTransferParams | None)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{TRANSFER_FIELD}: {error}", param=TRANSFER_FIELD) from None
