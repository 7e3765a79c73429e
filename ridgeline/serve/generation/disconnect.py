"""Stop work for a client that has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from ridgeline.serve.errors import ClientDisconnected


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, and raise ClientDisconnected in its place.

    Starlette would run the handler to its end although the response cannot be sent any more. The
    body of the request must have been read.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels, is_disconnected = task.cancelling(), False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # a cancel from elsewhere (a server that shuts down) is passed on as it is
        if is_disconnected and task.uncancel() <= num_cancels:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()
