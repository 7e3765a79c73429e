"""What was freed goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ridgeline.compress.free_memory import release_free_pages

pytestmark = pytest.mark.slow


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_under_what_is_kept_goes_back() -> None:
    """Allocations too small for separate pages, with the last one kept: the heap cannot shrink by
    itself."""
    pieces = [bytearray(b"x" * 60_000) for _ in range(2000)]
    kept, full = pieces.pop(), resident_bytes()
    pieces.clear()
    release_free_pages()
    assert full - resident_bytes() > 60_000_000
    assert len(kept) == 60_000
