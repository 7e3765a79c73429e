"""How much memory the C library has handed out, which tells the size of what other libraries build.

Python does not see what llguidance allocates, and the resident set does not fall when memory is
freed. Other threads allocate at the same time: a difference is an estimate.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd",
    "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@cache
def _mallinfo2() -> Any:
    """glibc's function (2.33 and later), which takes about 20 µs; None elsewhere."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = _MallocInfo
    return function


def heap_bytes() -> int | None:
    """Bytes in use that malloc has handed out in this process; None if the C library cannot say."""
    function = _mallinfo2()
    if function is None:
        return None
    info = function()
    return int(info.uordblks + info.hblkhd)
