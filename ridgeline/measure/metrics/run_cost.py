"""What a run's tokens cost at a price per hour of the machine. Pure arithmetic, shared by reports.

The machine costs the same whatever it does, so all of its time is charged to what came out of it:
to all output tokens (`per_output_token`, the price of a hidden prompt included), or split between
input and output by the time that requests spent in prefill and in decode.
"""

from __future__ import annotations

import math

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.latency import outcome
from ridgeline.measure.metrics.summary import Summary
from ridgeline.records import RunTrace
from ridgeline.records.price import dollars_per_million, dollars_per_unit


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
    good = None if goodput_req_s is None else dollars_per_unit(dollars_per_hour, goodput_req_s)
    return Cost(
        dollars_per_hour=dollars_per_hour,
        per_million_output=tokens(output_tok_s),
        per_million_input_split=tokens(input_tok_s, prefill_share),
        per_million_output_split=tokens(output_tok_s, rest),
        per_request=dollars_per_unit(dollars_per_hour, request_rate),
        per_good_request=good,
    )


def cost_of_run(run: RunTrace, summary: Summary, dollars_per_hour: float | None) -> Cost | None:
    if dollars_per_hour is None:
        return None
    return cost_of(
        dollars_per_hour,
        input_tok_s=summary.input_tok_s,
        output_tok_s=summary.output_tok_s,
        request_rate=summary.request_rate,
        goodput_req_s=summary.goodput.goodput_req_s if summary.goodput else None,
        prefill_share=prefill_share(run),
    )


def prefill_share(run: RunTrace) -> float | None:
    """Of the time that requests were being served, the part until their first token."""
    served = [r for r in run.requests if outcome(r) == "ok" and r.token_s]
    starts = [r.started_s if r.started_s is not None else r.sent_s for r in served]
    first = sum(r.token_s[0] - start for r, start in zip(served, starts, strict=True))
    whole = sum(r.token_s[-1] - start for r, start in zip(served, starts, strict=True))
    return first / whole if whole > 0 else None


def cost_line(cost: Cost) -> str:
    """One line for the console."""
    parts = [
        (cost.per_million_output, "1M output tokens"),
        (cost.per_million_input_split, "1M input (by time in prefill)"),
        (cost.per_request, "a request"),
        (cost.per_good_request, "a request in time"),
    ]
    told = [f"${value:.4g} for {what}" for value, what in parts if value is not None]
    return f"cost at ${cost.dollars_per_hour:g}/h: {', '.join(told) or 'nothing came out'}"
