"""Memory that was freed, given back to the system.

The C library keeps what is freed for its next user. A layer's temporaries come in many sizes, so
that what one stage leaves behind seldom fits the next: resident memory grows with every layer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], object] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none


def give_back() -> None:
    """Return freed pages to the system, where the C library can be told to."""
    if (trim := _trim()) is not None:
        trim(0)
