"""The scripted mock server, running on an event loop in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer


@contextmanager
def mock_server(server: MockServer | None = None, **pace: float) -> Iterator[str]:
    mock = server or MockServer(MockPace(**pace))
    loop = asyncio.new_event_loop()
    up, stop, urls = threading.Event(), asyncio.Event(), []

    async def main() -> None:
        listening = await mock.listen("127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        up.set()
        await stop.wait()
        listening.close()
        await asyncio.sleep(0.05)  # the clients' connections end
        mock.close_connections()
        await asyncio.sleep(0)  # the transports close their sockets

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    up.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
