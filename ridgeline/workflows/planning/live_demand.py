"""The demand on a fleet from the traffic of a server that runs already."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from ridgeline.config.planning import PlanOptions
from ridgeline.measure.monitors.traffic import TrafficSample
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.fleet.demand import Demand, demand_of_traffic
from ridgeline.records.traffic import TrafficProfile
from ridgeline.workflows.load.live_traffic import read_traffic, sample_live_traffic

NUM_READINGS = 4  # differences between them show whether the server was restarted
_Z = 1.2816  # a standard normal lies within ±1.2816 with probability 0.8


class LiveTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic that a demand was taken from; `missing`: what the server does not report."""

    url: str
    duration_s: float
    profile: TrafficProfile
    missing: tuple[str, ...]

    @property
    def note(self) -> str:
        """What was read, and how far a count of Poisson arrivals may be off."""
        number = self.profile.num_requests
        off = _Z / math.sqrt(number) if number else 1.0
        text = (
            f"demand of {self.url}: {number:,} requests finished in {self.duration_s:.0f} s "
            f"(80 % interval of the rate: ±{off:.0%}); a plan for the busiest hour needs the "
            "metrics of that hour"
        )
        if self.missing:
            text += f"; not reported: {', '.join(self.missing)}"
        return text


def live_demand(
    options: PlanOptions,
    spec: ModelSpec,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Demand, LiveTraffic]:
    """Read the metrics of `--from-traffic` for a while.

    Raises CannotRun without traffic, BadInput where the server does not report lengths or a rate.
    """
    url = options.from_traffic
    assert url is not None
    duration = options.traffic_duration
    sample: TrafficSample = sample_live_traffic(
        lambda: read_traffic(url, options.api_key, clock()),
        url,
        (duration, duration / NUM_READINGS),
        clock,
        sleep,
    )
    demand = demand_of_traffic(sample.profile)
    # The upper bounds of bins may exceed any context; what the server answered did fit its own.
    longest = max(demand.isl + demand.osl, min(demand.longest, spec.max_positions))
    p95 = min(demand.isl_p95, max(demand.isl, spec.max_positions - demand.osl))
    demand = msgspec.structs.replace(demand, longest=longest, isl_p95=p95)
    return demand, LiveTraffic(
        url=url,
        duration_s=sample.duration_s,
        profile=sample.profile,
        missing=sample.missing,
    )
