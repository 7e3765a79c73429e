"""When requests arrive: the processes that answer "when is the next request due?".

    closed:8        closed loop: 8 users, each sends its next request when the last one is answered
    constant:4      open loop: 4 requests/s at equal distances
    poisson:4       open loop: 4 requests/s, exponential gaps (independent users)
    gamma:4:0.5     open loop: 4 requests/s, gamma gaps; burstiness 0.5 is burstier than Poisson
    burst           everything at once

An open loop does not slow down when the server does, as the world does not; a closed loop does,
and therefore cannot show a queue. Gamma gaps have shape = burstiness and scale = 1 / (rate x
burstiness), so their coefficient of variation is 1 / sqrt(burstiness): 1 is Poisson, infinity is
constant (vLLM's convention). Gaps are not rescaled to hit the rate exactly: the variance of the
sample mean is part of the process. The first request of an open loop is due at 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from ridgeline.errors import BadInput

_FORMS = "closed:8, constant:4, poisson:4, gamma:4:0.5, burst"


class Due(Protocol):
    """One run of a process; has state."""

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        """The instant at which the next request is due (perhaps past), or None: ask after one has
        ended.
        """
        ...


class Arrivals(Protocol):
    """A process: a value. `start` begins one run of it; equal seeds give equal runs."""

    @property
    def label(self) -> str:
        """The string that `parse_arrivals` reads back."""
        ...

    @property
    def rate(self) -> float | None:
        """Offered requests per second; None where the server's own pace decides."""
        ...

    def start(self, seed: int) -> Due: ...


class Closed(msgspec.Struct, frozen=True):
    """`concurrency` requests in flight at all times."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise BadInput("a closed loop needs users", value=self.concurrency, limit=">= 1")

    @property
    def label(self) -> str:
        return f"closed:{self.concurrency}"

    @property
    def rate(self) -> float | None:
        return None

    def start(self, seed: int) -> Due:
        return _ClosedDue(self.concurrency)


class Renewal(msgspec.Struct, frozen=True):
    """Open loop at `rate` requests/s with independent gamma gaps; the edge cases have their own
    names.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate_per_s), ("burstiness", self.burstiness)):
            if math.isnan(value) or value <= 0:
                raise BadInput(f"the {name} of arrivals must be positive", value=value, limit="> 0")

    @property
    def label(self) -> str:
        if math.isinf(self.rate_per_s):
            return "burst"
        names = {1.0: "poisson", math.inf: "constant"}
        if self.burstiness in names:
            return f"{names[self.burstiness]}:{self.rate_per_s!r}"
        return f"gamma:{self.rate_per_s!r}:{self.burstiness!r}"

    @property
    def rate(self) -> float | None:
        return self.rate_per_s

    def start(self, seed: int) -> Due:
        return _RenewalDue(self, random.Random(f"{seed}/arrivals"))


class _ClosedDue:
    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        return now_s if num_in_flight < self._concurrency else None


class _RenewalDue:
    def __init__(self, process: Renewal, rng: random.Random) -> None:
        self._process, self._rng, self._at_s = process, rng, 0.0

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        at_s = self._at_s
        self._at_s += self._gap()
        return at_s

    def _gap(self) -> float:
        rate, burstiness = self._process.rate_per_s, self._process.burstiness
        if math.isinf(rate) or math.isinf(burstiness):
            return 1 / rate
        return self._rng.gammavariate(burstiness, 1 / (rate * burstiness))


def constant(rate: float) -> Renewal:
    return Renewal(rate, math.inf)


def poisson(rate: float) -> Renewal:
    return Renewal(rate)


def gamma(rate: float, burstiness: float) -> Renewal:
    return Renewal(rate, burstiness)


def burst() -> Renewal:
    return Renewal(math.inf)


# name → (constructor, the types of its parts)
REGISTRY: Mapping[str, tuple[Callable[..., Arrivals], tuple[type, ...]]] = MappingProxyType(
    {
        "closed": (Closed, (int,)),
        "constant": (constant, (float,)),
        "poisson": (poisson, (float,)),
        "gamma": (gamma, (float, float)),
        "burst": (burst, ()),
    }
)


def parse_arrivals(text: str) -> Arrivals:
    """An arrival process from its label."""
    name, *parts = text.split(":")
    if name not in REGISTRY:
        raise BadInput("no such arrival process", value=text, limit=_FORMS)
    make, types = REGISTRY[name]
    try:
        values = [kind(part) for kind, part in zip(types, parts, strict=True)]
    except ValueError:
        raise BadInput("malformed arrivals", value=text, limit=_FORMS) from None
    return make(*values)


def arrivals_from_flags(
    request_rate: float = math.inf, burstiness: float = 1.0, max_concurrency: int | None = None
) -> Arrivals:
    """vLLM's flags. An infinite rate under a concurrency cap is a closed loop, and is named one."""
    if math.isinf(request_rate) and request_rate > 0:
        return Closed(max_concurrency) if max_concurrency is not None else burst()
    return Renewal(request_rate, burstiness)
