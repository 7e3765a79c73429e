"""Serve scripted answers over TCP, to test load generators against."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from ridgeline.config.tools import MockServerOptions
from ridgeline.errors import CannotRun
from ridgeline.measure.mock.cases import CASES
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer, ServedAnswer
from ridgeline.report.files import write_file
from ridgeline.report.result import Result


class MockServerRun(Result, frozen=True, kw_only=True):
    """The answers that the server gave, with the instants at which their tokens were sent."""

    url: str
    served: tuple[ServedAnswer, ...]

    def save_log(self, path: Path) -> Path:
        """Write one JSON line per answer."""
        write_file(path, (msgspec.json.encode(answer) + b"\n" for answer in self.served))
        return path


def _ignore(url: str) -> None:
    pass


def run_mock_server(
    options: MockServerOptions, *, on_ready: Callable[[str], None] = _ignore
) -> MockServerRun:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the URL. Raises CannotRun."""
    pace = MockPace(
        ttft_s=options.ttft_ms / 1000,
        itl_s=options.itl_ms / 1000,
        per_chunk=options.tokens_per_chunk,
        slots=options.max_num_seqs,
    )
    server = MockServer(pace)
    url = asyncio.run(_serve(server, options.host, options.port, on_ready))
    return MockServerRun(url=url, served=tuple(server.served))


def script_summaries() -> dict[str, str]:
    """Model name → what its scripted answer shows."""
    return {case.name: case.about for case in CASES.values()}


async def _serve(server: MockServer, host: str, port: int, on_ready: Callable[[str], None]) -> str:
    try:
        listening = await server.listen(host, port)
    except OSError as error:
        raise CannotRun(
            "cannot listen", value=f"{host}:{port}", fix=f"choose another --port ({error.strerror})"
        ) from None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    address = listening.sockets[0].getsockname()
    url = f"http://{address[0]}:{address[1]}"
    on_ready(url)
    async with listening:
        await stop.wait()
    return url
