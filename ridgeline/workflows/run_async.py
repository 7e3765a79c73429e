"""Run a coroutine from synchronous code, also where an event loop already runs (a notebook)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ridgeline.errors import RidgelineError

T = TypeVar("T")

SHUTDOWN = "unhandled exception during asyncio.run() shutdown"


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`; in a thread of its own if this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    with ThreadPoolExecutor(1, thread_name_prefix="ridgeline-workflow") as pool:
        return pool.submit(_run, main).result()


def _run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_handle_exception)
        return runner.run(main)


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log as usual, but no expected error of a task that SIGTERM cancelled: SystemExit says it."""
    is_ending = SHUTDOWN in context["message"]
    if not (is_ending and isinstance(context.get("exception"), RidgelineError)):
        loop.default_exception_handler(context)
