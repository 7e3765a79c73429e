"""What running devices of one's own costs per hour, and from which volume on it is the cheaper way.

    rented    devices · price, on demand, reserved or spot; spot also pays for the work that is lost
              when it is taken away
    owned     purchase spread over the years of use, power (boards and host, times PUE) and the rest

Energy per token is power over tokens per second; design power is an upper bound, not a measurement.
"""

from __future__ import annotations

from math import inf

import msgspec

from ridgeline.errors import BadInput
from ridgeline.plan.fleet.search import Candidate
from ridgeline.records.price import HOUR_S

HOURS_PER_YEAR = 8760


class OwnedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was bought. `watts` under load, host included; `upkeep_per_hour` the rest."""

    dollars: float
    years: float
    watts: float
    dollars_per_kwh: float
    pue: float = 1.3
    upkeep_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dollars", "watts", "dollars_per_kwh", "upkeep_per_hour"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise BadInput(f"an owned device's {name}", value=value, limit=">= 0")
        if not 0 < self.years < inf:
            raise BadInput("an owned device serves for some years", value=self.years, limit="> 0")
        if not 1 <= self.pue < inf:
            raise BadInput("PUE is at least 1", value=self.pue)

    @property
    def dollars_per_hour(self) -> float:
        power = self.watts / 1000 * self.pue * self.dollars_per_kwh
        return self.dollars / (self.years * HOURS_PER_YEAR) + power + self.upkeep_per_hour


class SpotDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that may be taken away: `lost_s` of its work and of starting again each time."""

    price: float
    interruptions_per_hour: float
    lost_s: float

    def __post_init__(self) -> None:
        for name in ("price", "interruptions_per_hour", "lost_s"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise BadInput(f"a spot device's {name}", value=value, limit=">= 0")

    @property
    def dollars_per_hour(self) -> float:
        """Of an hour of useful work. BadInput where there is none."""
        lost = self.interruptions_per_hour * self.lost_s / 3600
        if lost >= 1:
            raise BadInput("spot devices would do nothing but start again", value=lost, limit="< 1")
        return self.price / (1 - lost)


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """`rate`: requests per second from which the fleet is cheaper than the provider (None: never);
    `share` of one replica's capacity that this is.
    """

    rate: float | None
    requests_per_month: float | None
    share: float | None
    dollars_per_request: float
    api_dollars_per_request: float


def break_even(fleet: Candidate, dollars_per_hour: float, api_dollars: float) -> BreakEven:
    """One replica of the fleet's kind against `api_dollars` per request.

    A replica costs the same whatever it does; where it is cheaper full, it is from some load on.
    Where it is not, more replicas are not either.
    """
    per_second = dollars_per_hour / fleet.num_replicas / HOUR_S
    rate = per_second / api_dollars if api_dollars > 0 else float("inf")
    reached = rate <= fleet.rate
    return BreakEven(
        rate=rate if reached else None,
        requests_per_month=rate * 730 * HOUR_S if reached else None,
        share=rate / fleet.rate if reached else None,
        dollars_per_request=per_second / fleet.rate,
        api_dollars_per_request=api_dollars,
    )


def joules_per_output_token(watts: float, rate: float, osl: int) -> float:
    """Energy of everything, charged to output tokens."""
    return watts / (rate * osl)


def kwh_per_million(joules_per_token: float) -> float:
    """Kilowatt-hours per million tokens."""
    return joules_per_token * 1e6 / 3.6e6
