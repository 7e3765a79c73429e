"""Returns freed memory to the operating system.

The C library keeps freed memory for reuse. A layer's temporaries have many sizes, so what one stage
leaves behind rarely fits the next, and resident memory would grow with every layer.
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


def release_free_pages() -> None:
    """Return freed pages to the system if the C library supports it."""
    if (trim := _trim()) is not None:
        trim(0)
