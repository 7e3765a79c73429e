"""`ridgeline mock-server`: the scripted server over TCP, to hold any load tool against."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec
from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import MockServerOptions
from ridgeline.errors import CannotRun
from ridgeline.measure.mock.cases import CASES
from ridgeline.measure.mock.pace import MockPace
from ridgeline.measure.mock.server import MockServer
from ridgeline.report.files import write_file


def mock_server(call: Invocation) -> int:
    """`ridgeline mock-server`."""
    options = call.read(MockServerOptions)
    if options.list_scripts:
        return describe()
    pace = MockPace(
        ttft_s=options.ttft_ms / 1000,
        itl_s=options.itl_ms / 1000,
        per_chunk=options.tokens_per_chunk,
        slots=options.max_num_seqs,
    )
    return command(options.host, options.port, pace, options.log)


def command(host: str, port: int, pace: MockPace, log: Path | None) -> int:
    """Serve until interrupted; then write what was served. The exit code."""
    server = MockServer(pace)
    asyncio.run(_serve(server, host, port))
    if log is not None:
        write_file(log, (msgspec.json.encode(served) + b"\n" for served in server.served))
    return 0


def describe() -> int:
    """Print every script with what it shows."""
    for case in CASES.values():
        print(f"{case.name:<16} {case.about}")
    return 0


async def _serve(server: MockServer, host: str, port: int) -> None:
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
    bound = listening.sockets[0].getsockname()
    Console(stderr=True, highlight=False).print(f"mock server on http://{bound[0]}:{bound[1]}")
    async with listening:
        await stop.wait()
