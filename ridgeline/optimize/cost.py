"""Dollars per million tokens at the SLO: what a machine costs per hour over what it does in it.

Only tokens of requests that kept the promise count: tokens that came too late were paid for and not
delivered. The price of the machine is the user's; without one, everything is quoted at a notional
$1 per hour, which leaves every ratio right.
"""

from __future__ import annotations

import msgspec

from ridgeline.records.price import dollars_per_million

NOTIONAL_PRICE = 1.0


class MachinePrice(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars per machine-hour; `notional` where nobody named one."""

    dollars_per_hour: float = NOTIONAL_PRICE
    notional: bool = True


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars per million tokens; None where nothing was delivered within the SLO."""

    output_dollars_per_mtok: float | None
    total_dollars_per_mtok: float | None


def cost_of(price: MachinePrice, good_output_tok_s: float, good_input_tok_s: float) -> TokenCost:
    """The whole bill divided by output tokens alone, and by input and output tokens together."""
    return TokenCost(
        output_dollars_per_mtok=dollars_per_million(price.dollars_per_hour, good_output_tok_s),
        total_dollars_per_mtok=dollars_per_million(
            price.dollars_per_hour, good_output_tok_s + good_input_tok_s
        ),
    )
