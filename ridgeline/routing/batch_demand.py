"""How many servers the open requests of batches need to end by their deadlines.

Of the batches that are due by an instant, every request takes the seconds that a request took of
late, at the pace that interactive requests leave; the servers needed until then are their sum over
the time that is left. The largest such number over all deadlines counts. Batch stores, the gateway,
Ray and the simulator use the same. No clock: instants are arguments, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

HALF_LIFE_S = 600.0  # of work in the pace of requests
MIN_LEFT_S = 1.0  # until a deadline, at least: it may have passed


class BatchPace:
    """Seconds of a server per batch request; older work counts half for every `HALF_LIFE_S`.

    While a server runs fewer requests than it could, because no more are open, it is only partly
    at work: else many servers that share a few requests would each seem slow, and want more.
    """

    def __init__(self) -> None:
        self._busy_s = self._num_results = self._share = 0.0
        self._last_s: float | None = None

    def note(self, now_s: float, num_results: int, share: float) -> None:
        """`num_results` since the last call; `share`: the requests that run from now on, of those
        that could run at once."""
        if self._last_s is not None:
            elapsed_s = max(0.0, now_s - self._last_s)
            kept = 0.5 ** (self._share * elapsed_s / HALF_LIFE_S)
            self._busy_s = kept * self._busy_s + self._share * elapsed_s
            self._num_results *= kept
        self._num_results += num_results
        self._last_s, self._share = now_s, share

    @property
    def seconds_per_request(self) -> float | None:
        """None before the first result."""
        return self._busy_s / self._num_results if self._num_results > 0 else None


def wanted_servers(
    open_until: Iterable[tuple[int, float]], seconds_per_request: float, now_s: float
) -> float:
    """Servers of this pace, all of their time, that end every batch by its deadline; at most one
    for each open request. `open_until`: the open requests of each batch, and its deadline."""
    num_open, wanted = 0, 0.0
    for num_of_batch, due_s in sorted(open_until, key=lambda batch: batch[1]):
        num_open += num_of_batch
        left_s = max(MIN_LEFT_S, due_s - now_s)
        wanted = max(wanted, min(num_open, num_open * seconds_per_request / left_s))
    return wanted


def batch_demand(demands: Iterable[tuple[str, float]]) -> float:
    """Servers for all batch stores, from what each server says (its store, the servers it needs);
    of those that share a store, the largest number counts."""
    by_store: dict[str, float] = {}
    for store, servers in demands:
        by_store[store] = max(servers, by_store.get(store, 0.0))
    return sum(by_store.values())
