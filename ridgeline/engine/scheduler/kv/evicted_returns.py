"""Whether what the KV cache evicts is asked for again: as long as it is, a copy pays.

    expecting ──`trial` blocks saved, none loaded or asked for──▶ doubting
        ▲                                                            │ remembers digests only
        └──────── a sequence asks for a block that was evicted ──────┘

At first, evicted blocks are expected to return, so that the first conversation that does is found.
A workload without reuse costs the copies of the trial, and then a dictionary entry per block; one
whose conversations begin to return later computes the first of them again.

Source. The idea of a list of evicted keys without contents ("ghosts") is that of 2Q (Johnson and
Shasha, VLDB 1994) and ARC (Megiddo and Modha, FAST 2003).
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 65_536
"""Digests of evicted blocks that are remembered at most: about 10 MB."""


class EvictedReturns:
    """`trial`: blocks that are saved in a row before their return is doubted."""

    def __init__(self, trial: float, max_remembered: int = MAX_REMEMBERED) -> None:
        self._trial, self._max_remembered = trial, max_remembered
        self._num_saved = 0  # since the last return
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # while it is doubted

    @property
    def are_expected(self) -> bool:
        return self._num_saved < self._trial

    def note_saved(self) -> None:
        """A block was copied to a tier."""
        self._num_saved += 1

    def note_loaded(self) -> None:
        """A block came back from a tier."""
        self._expect()

    def note_evicted(self, digest: bytes) -> None:
        """A block was evicted and not saved, because its return is doubted."""
        self._evicted[digest] = None
        self._evicted.move_to_end(digest)
        if len(self._evicted) > self._max_remembered:
            self._evicted.popitem(last=False)

    def note_missing(self, digest: bytes) -> None:
        """A sequence needs a block that is in no tier."""
        if digest in self._evicted:
            self._expect()

    def _expect(self) -> None:
        self._num_saved = 0
        self._evicted.clear()
