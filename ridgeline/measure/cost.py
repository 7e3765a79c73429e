"""What a run's tokens cost at a price per hour of the machine. Pure arithmetic, shared by reports.

The machine costs the same whatever it does, so all of its time is charged to what came out of it:
to all output tokens (`per_output_token`, the price of a hidden prompt included), or split between
input and output by the time that requests spent in prefill and in decode.
"""

from __future__ import annotations

import math

import msgspec

from ridgeline.errors import BadInput
from ridgeline.records.price import dollars_each, dollars_per_million


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars. None where nothing came out that could be charged. `*_split`: prefill's share of the
    time goes to input tokens, the rest to output tokens.
    """

    dollars_per_hour: float
    per_million_output: float | None
    per_million_input_split: float | None
    per_million_output_split: float | None
    per_request: float | None
    per_good_request: float | None


def cost_of(
    dollars_per_hour: float,
    *,
    input_tok_s: float,
    output_tok_s: float,
    request_rate: float,
    goodput_req_s: float | None,
    prefill_share: float | None,
) -> Cost:
    """`prefill_share` of the served time went into prompts; None where it is not known."""
    if not (math.isfinite(dollars_per_hour) and dollars_per_hour >= 0):
        raise BadInput("the price per hour must not be negative", value=dollars_per_hour)

    def tokens(tok_s: float, share: float | None = 1.0) -> float | None:
        return None if share is None else dollars_per_million(dollars_per_hour, tok_s, share)

    rest = None if prefill_share is None else 1 - prefill_share
    good = None if goodput_req_s is None else dollars_each(dollars_per_hour, goodput_req_s)
    return Cost(
        dollars_per_hour=dollars_per_hour,
        per_million_output=tokens(output_tok_s),
        per_million_input_split=tokens(input_tok_s, prefill_share),
        per_million_output_split=tokens(output_tok_s, rest),
        per_request=dollars_each(dollars_per_hour, request_rate),
        per_good_request=good,
    )
