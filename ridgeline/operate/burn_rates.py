"""How fast an error budget may burn before an alert fires (Google's SRE Workbook, chapter 5).

An alert needs its burn rate in a long window, so that it means something, and in a short one, so
that it ends soon after the trouble.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records import Slo


class BurnRate(msgspec.Struct, frozen=True):
    """Alert when the budget burns `factor` times as fast as it may, in both windows."""

    factor: float
    long: str
    short: str
    severity: Literal["page", "ticket"]


BURN_RATES = (
    BurnRate(14.4, "1h", "5m", "page"),
    BurnRate(6.0, "6h", "30m", "page"),
    BurnRate(3.0, "1d", "2h", "ticket"),
    BurnRate(1.0, "3d", "6h", "ticket"),
)
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")


def error_budget(name: str, slo: Slo) -> float:
    """The share of requests that may miss the SLO.

    Raises BadInput where the fastest burn rate would need more than all requests to fail: its alert
    could never fire.
    """
    budget, fastest = 1 - slo.attainment, BURN_RATES[0].factor
    if budget <= 0 or fastest * budget >= 1:
        raise BadInput(
            f"class {name} cannot be watched by burn rates: attainment must leave a budget of more "
            f"than 0, and of less than 1/{fastest:g} of the requests",
            value=f"attainment:{slo.attainment:g}",
            limit=f"{1 - 1 / fastest:.3f} < attainment < 1",
            fix="write for example 'chat=ttft:500 attainment:0.99'",
        )
    return budget
