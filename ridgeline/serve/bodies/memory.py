"""A bound on the bytes of all request bodies that are held at once, and on those of one key.

Every connection may send a body of the size limit and then stay silent until the time limit:
thousands of them would fill the memory, though each is within its own limits.
"""

from __future__ import annotations

from collections import Counter

from ridgeline.serve.errors import ApiError

MAX_BODIES = 64
"""Bodies of the largest size that may be held at once; one key may hold half of them."""


class BodyMemory:
    """Counts the bytes of request bodies that are held, by the name of the key they came with."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self.max_bytes, self.max_bytes_per_key = max_bytes, max_bytes_per_key
        self.num_bytes = 0
        self._by_key: Counter[str] = Counter()

    def reserve(self, key: str) -> BodyReservation:
        """An empty reservation, to be closed when the body is no longer held."""
        return BodyReservation(self, key)

    def add(self, key: str, num_bytes: int) -> None:
        """ApiError 503 if the bytes exceed a bound; then nothing is counted."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise ApiError(503, f"too many request bodies; limit: {self.max_bytes} bytes in all")
        if key and self._by_key[key] + num_bytes > self.max_bytes_per_key:
            limit = f"limit: {self.max_bytes_per_key} bytes for each API key"
            raise ApiError(503, f"too many request bodies; {limit}")
        self.num_bytes += num_bytes
        self._by_key[key] += num_bytes

    def remove(self, key: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._by_key[key] -= num_bytes
        if not self._by_key[key]:
            del self._by_key[key]


class BodyReservation:
    """The bytes of one body."""

    def __init__(self, memory: BodyMemory, key: str) -> None:
        self._memory, self._key, self._num_bytes = memory, key, 0

    def add(self, num_bytes: int) -> None:
        """Bytes that arrived. ApiError 503 if there is no room for them."""
        self._memory.add(self._key, num_bytes)
        self._num_bytes += num_bytes

    def close(self) -> None:
        self._memory.remove(self._key, self._num_bytes)
        self._num_bytes = 0
