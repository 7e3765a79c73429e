"""Which replica gets the next request: policies as small objects over a snapshot.

    round-robin     in turn
    least-loaded    the one with the fewest requests in flight
    power-of-two    the lesser of two drawn at random (Mitzenmacher 2001)
    prefix-aware    the one that has seen the longest beginning of the prompt, unless it is much
                    busier than the least loaded (thresholds of the SGLang gateway: by more than 64
                    requests, and by half); where nobody has seen any of it, the least loaded,
                    and of several the one that has seen least
    session         the same replica for the same session (rendezvous hashing: when a replica comes
                    or goes, only its own sessions move)

The snapshot is exact and current: real routers see it late. Prefix-aware assumes no eviction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol

import numpy as np

from ridgeline.errors import BadInput

BALANCE_ABS, BALANCE_REL = 64, 1.5


class RoutedRequest(Protocol):
    """What a policy may look at."""

    @property
    def prefix(self) -> tuple[int, ...]: ...

    @property
    def session(self) -> str: ...


class Router(Protocol):
    """`active`: ids of the replicas that take requests; `load`: requests in flight by id."""

    def choose(self, request: RoutedRequest, active: Sequence[int], load: Sequence[int]) -> int: ...


class RoundRobin:
    def __init__(self, seed: int) -> None:
        self._turn = 0

    def choose(self, request: RoutedRequest, active: Sequence[int], load: Sequence[int]) -> int:
        self._turn += 1
        return active[(self._turn - 1) % len(active)]


class LeastLoaded:
    def __init__(self, seed: int) -> None:
        pass

    def choose(self, request: RoutedRequest, active: Sequence[int], load: Sequence[int]) -> int:
        return min(active, key=load.__getitem__)


class PowerOfTwo:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def choose(self, request: RoutedRequest, active: Sequence[int], load: Sequence[int]) -> int:
        if len(self._drawn) < 2:
            self._drawn = self._rng.random(4096).tolist()
        a = active[int(self._drawn.pop() * len(active))]
        b = active[int(self._drawn.pop() * len(active))]
        return a if load[a] <= load[b] else b


class PrefixAware:
    def __init__(self, seed: int) -> None:
        self._seen: dict[tuple[int, int], dict[int, None]] = {}
        self._num_seen: Counter[int] = Counter()

    def choose(self, request: RoutedRequest, active: Sequence[int], load: Sequence[int]) -> int:
        least = min(active, key=lambda replica: (load[replica], self._num_seen[replica]))
        found = self._longest(request.prefix, set(active))
        chosen = least if found is None or _much_busier(load[found], load[least]) else found
        for place in _places(request.prefix):
            homes = self._seen.setdefault(place, {})
            self._num_seen[chosen] += chosen not in homes
            homes[chosen] = None
        return chosen

    def _longest(self, prefix: tuple[int, ...], active: set[int]) -> int | None:
        for place in reversed(list(_places(prefix))):
            for replica in reversed(self._seen.get(place, {})):
                if replica in active:
                    return replica
        return None


def _places(prefix: tuple[int, ...]) -> list[tuple[int, int]]:
    """A block id counts at its depth: equal ids stand for equal beginnings."""
    return list(enumerate(prefix))


def _much_busier(load: int, least: int) -> bool:
    return load - least > BALANCE_ABS and load > BALANCE_REL * least


class SessionAffinity:
    def __init__(self, seed: int) -> None:
        self._salt = seed.to_bytes(8, "little")

    def choose(self, request: RoutedRequest, active: Sequence[int], load: Sequence[int]) -> int:
        name = self._salt + request.session.encode()
        return max(
            active, key=lambda replica: blake2b(name + replica.to_bytes(4, "little")).digest()
        )


ROUTERS: Mapping[str, Callable[[int], Router]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "power-of-two": PowerOfTwo,
        "prefix-aware": PrefixAware,
        "session": SessionAffinity,
    }
)


def make_router(name: str, seed: int = 0) -> Router:
    """The policy called `name`; BadInput lists them."""
    if name not in ROUTERS:
        raise BadInput("unknown routing policy", value=name, limit=", ".join(ROUTERS))
    return ROUTERS[name](seed)
