"""Hourly cost of rented or owned devices, and the volume from which a fleet beats an API provider.

    rented    devices · price, on demand, reserved or spot; spot also pays for work lost when
              a device is reclaimed
    owned     purchase price spread over years of use, power (boards and host, times PUE), upkeep

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
    """A purchased device.

    `watts`: under load, including the host; `upkeep_per_hour`: other costs.
    """

    dollars: float
    years: float
    watts: float
    dollars_per_kwh: float
    pue: float = 1.3
    upkeep_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dollars", "watts", "dollars_per_kwh", "upkeep_per_hour"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise BadInput(
                    f"{name} of an owned device must not be negative", value=value, limit=">= 0"
                )
        if not 0 < self.years < inf:
            raise BadInput(
                "years of use of an owned device must be positive", value=self.years, limit="> 0"
            )
        if not 1 <= self.pue < inf:
            raise BadInput("PUE must be at least 1", value=self.pue, limit=">= 1")

    @property
    def dollars_per_hour(self) -> float:
        power = self.watts / 1000 * self.pue * self.dollars_per_kwh
        return self.dollars / (self.years * HOURS_PER_YEAR) + power + self.upkeep_per_hour


class SpotDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that may be reclaimed; each time `lost_s` of work and restart are lost."""

    price: float
    interruptions_per_hour: float
    lost_s: float

    def __post_init__(self) -> None:
        for name in ("price", "interruptions_per_hour", "lost_s"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise BadInput(
                    f"{name} of a spot device must not be negative", value=value, limit=">= 0"
                )

    @property
    def dollars_per_hour(self) -> float:
        """Dollars per hour of useful work. Raises BadInput if no useful work is left."""
        lost = self.interruptions_per_hour * self.lost_s / 3600
        if lost >= 1:
            raise BadInput(
                "interruptions leave no time for useful work (interruptions_per_hour · lost_s)",
                value=lost,
                limit="< 1",
            )
        return self.price / (1 - lost)


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fleet breaks even with an API provider.

    `rate`: requests per second above which the fleet is cheaper (None: never); `share`: that rate
    as a share of one replica's capacity.
    """

    rate: float | None
    requests_per_month: float | None
    share: float | None
    dollars_per_request: float
    api_dollars_per_request: float


def break_even(fleet: Candidate, dollars_per_hour: float, api_dollars: float) -> BreakEven:
    """Compare one replica of the fleet's kind with `api_dollars` per request.

    A replica costs the same at any load, so it is cheaper from some load on, or never; in that case
    more replicas are not cheaper either.
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
    """Total energy divided by the number of output tokens."""
    return watts / (rate * osl)


def kwh_per_million(joules_per_token: float) -> float:
    """Kilowatt-hours per million tokens."""
    return joules_per_token * 1e6 / 3.6e6
