"""Arrival processes: when the next request of a load is due.

    closed:8        closed loop: 8 users, each sends a request when the last one is answered
    constant:4      open loop: 4 requests/s at equal distances
    poisson:4       open loop: 4 requests/s, exponential gaps (independent users)
    gamma:4:0.5     open loop: 4 requests/s, gamma gaps; burstiness 0.5 is burstier than Poisson
    ramp:1:16:60    open loop: Poisson, from 1 to 16 requests/s in 60 s (linear), then 16
    ramp-exp:1:16:60   the same, growing by equal factors
    burst           all requests at once
    replay          at the times of a recorded trace, optionally sped up (`replay`; not a label)

Like real traffic, an open loop does not slow down when the server does; a closed loop does, and
therefore cannot show a queue. Gamma gaps have shape = burstiness and scale = 1 / (rate x
burstiness), so their coefficient of variation is 1 / sqrt(burstiness): 1 is Poisson, infinity is
constant (vLLM's convention). Gaps are not rescaled to hit the rate exactly: the variance of the
sample mean is part of the process. The first request of an open loop is due at 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from ridgeline.errors import BadInput

_FORMS = "closed:8, constant:4, poisson:4, gamma:4:0.5, ramp:1:16:60, ramp-exp:1:16:60, burst"


class ArrivalSchedule(Protocol):
    """State of one run of an arrival process."""

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        """Seconds at which the next request is due: perhaps in the past, infinity if there is none.

        None: not known before a request in flight has ended.
        """
        ...


class Arrivals(Protocol):
    """An arrival process. `start` begins a run of it; equal seeds give equal runs."""

    @property
    def label(self) -> str:
        """The string that `parse_arrivals` reads back."""
        ...

    @property
    def rate(self) -> float | None:
        """Offered requests per second; None if the speed of the server decides."""
        ...

    def start(self, seed: int) -> ArrivalSchedule: ...


class Closed(msgspec.Struct, frozen=True):
    """`concurrency` requests in flight at all times."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise BadInput(
                "the concurrency of a closed loop is too small",
                value=self.concurrency,
                limit=">= 1",
            )

    @property
    def label(self) -> str:
        return f"closed:{self.concurrency}"

    @property
    def rate(self) -> float | None:
        return None

    def start(self, seed: int) -> ArrivalSchedule:
        return _ClosedSchedule(self.concurrency)


class Renewal(msgspec.Struct, frozen=True):
    """Open loop at `rate` requests/s with independent gamma-distributed gaps."""

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

    def start(self, seed: int) -> ArrivalSchedule:
        return _RenewalSchedule(self, random.Random(f"{seed}/arrivals"))


class Ramp(msgspec.Struct, frozen=True):
    """A Poisson process whose rate grows from `low` to `high` in `over_s` seconds, and stays there.

    Exact: unit exponentials are mapped by the inverse of the cumulative rate. Linear:
    L(t) = low t + (high - low) t^2 / 2T; exponential: L(t) = low T / k (e^(k t/T) - 1), with
    k = ln(high / low).
    """

    low: float
    high: float
    over_s: float
    exponential: bool = False

    def __post_init__(self) -> None:
        for name in ("low", "high", "over_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise BadInput(f"the ramp's {name} must be positive", value=value, limit="> 0")

    @property
    def label(self) -> str:
        name = "ramp-exp" if self.exponential else "ramp"
        return f"{name}:{self.low!r}:{self.high!r}:{self.over_s!r}"

    @property
    def rate(self) -> float | None:
        """The final rate."""
        return self.high

    @property
    def expected(self) -> float:
        """Expected requests during the ramp."""
        if not self.exponential or self.low == self.high:
            return (self.low + self.high) / 2 * self.over_s
        return (self.high - self.low) * self.over_s / math.log(self.high / self.low)

    def time_of(self, count: float) -> float:
        """Seconds after which `count` requests are expected."""
        if count >= self.expected:
            return self.over_s + (count - self.expected) / self.high
        if self.low == self.high:
            return count / self.low
        if self.exponential:
            k = math.log(self.high / self.low)
            return self.over_s / k * math.log1p(k * count / (self.low * self.over_s))
        slope = (self.high - self.low) / self.over_s
        return (math.sqrt(self.low * self.low + 2 * slope * count) - self.low) / slope

    def start(self, seed: int) -> ArrivalSchedule:
        return _RampSchedule(self, random.Random(f"{seed}/arrivals"))


class RecordedArrivals(msgspec.Struct, frozen=True):
    """Arrivals at times known in advance, such as those of a recorded trace."""

    at_s: tuple[float, ...]
    label: str
    rate: float | None = None

    def start(self, seed: int) -> ArrivalSchedule:
        return _ReplaySchedule(self.at_s)


def replay(at_s: Sequence[float], speed: float) -> RecordedArrivals:
    """The times of a trace, shifted to start at 0, `speed` times as fast. Raises BadInput."""
    if not (math.isfinite(speed) and speed > 0):
        raise BadInput("the replay speed must be positive", value=speed, limit="> 0")
    first = min(at_s)
    shifted = tuple((at - first) / speed for at in sorted(at_s))
    rate = (len(shifted) - 1) / shifted[-1] if shifted[-1] > 0 else None
    return RecordedArrivals(at_s=shifted, label=f"replay:{speed!r}", rate=rate)


class _RampSchedule:
    def __init__(self, ramp: Ramp, rng: random.Random) -> None:
        self._ramp, self._rng, self._count = ramp, rng, 0.0

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        at_s = self._ramp.time_of(self._count)
        self._count += self._rng.expovariate(1.0)
        return at_s


class _ReplaySchedule:
    def __init__(self, at_s: Sequence[float]) -> None:
        self._left = iter(at_s)

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        return next(self._left, math.inf)


class _ClosedSchedule:
    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def next(self, now_s: float, num_in_flight: int) -> float | None:
        return now_s if num_in_flight < self._concurrency else None


class _RenewalSchedule:
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


def ramp_exp(low: float, high: float, over_s: float) -> Ramp:
    return Ramp(low, high, over_s, exponential=True)


# name → (constructor, the types of its parts)
REGISTRY: Mapping[str, tuple[Callable[..., Arrivals], tuple[type, ...]]] = MappingProxyType(
    {
        "closed": (Closed, (int,)),
        "constant": (constant, (float,)),
        "poisson": (poisson, (float,)),
        "gamma": (gamma, (float, float)),
        "ramp": (Ramp, (float, float, float)),
        "ramp-exp": (ramp_exp, (float, float, float)),
        "burst": (burst, ()),
    }
)


def parse_arrivals(text: str) -> Arrivals:
    """An arrival process from its label. Raises BadInput."""
    name, *parts = text.split(":")
    if name not in REGISTRY:
        raise BadInput("unknown arrival process", value=text, limit=_FORMS)
    make, types = REGISTRY[name]
    try:
        values = [kind(part) for kind, part in zip(types, parts, strict=True)]
    except ValueError:
        raise BadInput("malformed arrivals", value=text, limit=_FORMS) from None
    return make(*values)


def arrivals_from_flags(
    request_rate: float = math.inf, burstiness: float = 1.0, max_concurrency: int | None = None
) -> Arrivals:
    """Arrivals from vLLM's flags. An infinite rate with a concurrency limit is a closed loop."""
    if math.isinf(request_rate) and request_rate > 0:
        return Closed(max_concurrency) if max_concurrency is not None else burst()
    return Renewal(request_rate, burstiness)
