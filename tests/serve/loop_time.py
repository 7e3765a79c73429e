"""How long callbacks hold an event loop, in CPU time, which other processes do not disturb."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class CallbackTimes:
    """The longest callback since `reset`, in seconds of CPU time of the loop's thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def reset(self) -> None:
        self.longest_s = 0.0


@contextmanager
def callback_times() -> Iterator[CallbackTimes]:
    """Measure every callback of the loops in this process while the block runs."""
    times, run = CallbackTimes(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        times.longest_s = max(times.longest_s, time.thread_time() - began_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield times
