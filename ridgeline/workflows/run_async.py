"""Run a coroutine from synchronous code, also where an event loop already runs (a notebook)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`; in a thread of its own if this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with ThreadPoolExecutor(1, thread_name_prefix="ridgeline-workflow") as pool:
        return pool.submit(asyncio.run, main).result()
