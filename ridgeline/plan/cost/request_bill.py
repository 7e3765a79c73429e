"""What a request costs on a fleet: money, device time and energy, failures paid for.

A fleet is paid for whether its requests succeed or not. Its size guarantees that the SLO's share of
requests (attainment) is within the limits, of those that do not fail; the bill of a successful
request is that of all of them, divided by this share.
"""

from __future__ import annotations

import msgspec

from ridgeline.plan.cost.ownership import kwh_per_million
from ridgeline.plan.fleet.search import Candidate
from ridgeline.records import Slo
from ridgeline.records.price import HOUR_S
from ridgeline.report.numbers import rounded


class RequestBill(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars, device hours and energy of requests.

    `success_share`: requests that neither fail nor miss the SLO, at least. `per_success`: dollars
    per such request, at most. `device_hours_per_1000`: of 1,000 requests at the demanded rate.
    `kwh_per_million_output`: by the boards' design power, an upper bound without the host. Fields
    are None where a price or a power is unknown.
    """

    success_share: float
    per_request: float | None
    per_success: float | None
    device_hours_per_1000: float
    kwh_per_million_output: float | None

    @property
    def sentence(self) -> str:
        """The bill in words; dollars per 1,000 requests."""
        parts = [f"1,000 requests take {rounded(self.device_hours_per_1000)} device hours"]
        if self.per_success is not None:
            parts.append(
                f"1,000 successful ones cost at most ${rounded(1000 * self.per_success)} "
                f"({self.success_share:.0%} succeed within the SLO)"
            )
        if self.kwh_per_million_output is not None:
            parts.append(f"1M output tokens at most {rounded(self.kwh_per_million_output)} kWh")
        return "; ".join(parts)


def request_bill(
    fleet: Candidate, rate: float, slo: Slo, dollars_per_hour: float | None
) -> RequestBill:
    """The bill of a fleet that serves `rate` requests per second within `slo`."""
    success_share = slo.attainment * (1 - slo.error_rate)
    per_request = None if dollars_per_hour is None else dollars_per_hour / HOUR_S / rate
    joules = fleet.joules_per_output_token
    return RequestBill(
        success_share=success_share,
        per_request=per_request,
        per_success=None if per_request is None else per_request / success_share,
        device_hours_per_1000=fleet.num_devices / rate * 1000 / HOUR_S,
        kwh_per_million_output=None if joules is None else kwh_per_million(joules),
    )
