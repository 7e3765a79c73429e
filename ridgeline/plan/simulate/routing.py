"""Routing policies: which replica gets the next request.

    round-robin     each replica in turn
    least-loaded    the replica with the fewest requests in flight
    power-of-two    the less loaded of two random replicas (Mitzenmacher 2001)
    prefix-aware    the replica that has seen the longest prefix of the prompt, unless it has over
                    64 requests and 1.5 times more in flight than the least loaded one (thresholds
                    of the SGLang gateway); for an unseen prefix the least loaded, and among equals
                    the one that has seen the fewest prefixes
    session         the same replica for the same session (rendezvous hashing: when a replica comes
                    or goes, only its own sessions move)

Loads are exact and current, whereas real routers see them late. Prefix-aware assumes no eviction.
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
    """What a policy may read of a request."""

    @property
    def prefix(self) -> tuple[int, ...]: ...

    @property
    def session(self) -> str: ...


class Router(Protocol):
    """Chooses a replica id from `active`; `load` holds the requests in flight by id."""

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
        seen = self._longest(request.prefix, set(active))
        chosen = least if seen is None or _much_busier(load[seen], load[least]) else seen
        for block in _prefix_blocks(request.prefix):
            holders = self._seen.setdefault(block, {})
            self._num_seen[chosen] += chosen not in holders
            holders[chosen] = None
        return chosen

    def _longest(self, prefix: tuple[int, ...], active: set[int]) -> int | None:
        for block in reversed(list(_prefix_blocks(prefix))):
            for replica in reversed(self._seen.get(block, {})):
                if replica in active:
                    return replica
        return None


def _prefix_blocks(prefix: tuple[int, ...]) -> list[tuple[int, int]]:
    """Blocks with their depth: equal ids at one depth stand for equal prefixes."""
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
    """The policy called `name`. Raises BadInput that lists them for an unknown one."""
    if name not in ROUTERS:
        raise BadInput("unknown routing policy", value=name, limit=", ".join(ROUTERS))
    return ROUTERS[name](seed)
