"""Dollars per million tokens at the SLO: the machine's hourly price over what it delivers in an
hour.

Only tokens of requests that met the SLO count. Without a price from the user, costs are quoted at a
notional $1 per hour, which leaves every ratio correct.
"""

from __future__ import annotations

import msgspec

from ridgeline.records.price import dollars_per_million

NOTIONAL_PRICE = 1.0


class MachinePrice(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars per machine-hour; `notional` if the user named no price.

    `speed`: hours of the machine in an hour of measurement, which is 1 except for twins.
    """

    dollars_per_hour: float = NOTIONAL_PRICE
    notional: bool = True
    speed: float = 1.0


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars per million tokens; None if no request met the SLO."""

    output_dollars_per_mtok: float | None
    total_dollars_per_mtok: float | None


def cost_of(price: MachinePrice, good_output_tok_s: float, good_input_tok_s: float) -> TokenCost:
    """Divide the whole bill by output tokens alone, and by input and output tokens together."""
    hourly = price.dollars_per_hour * price.speed
    return TokenCost(
        output_dollars_per_mtok=dollars_per_million(hourly, good_output_tok_s),
        total_dollars_per_mtok=dollars_per_million(hourly, good_output_tok_s + good_input_tok_s),
    )
