"""Cost of the tokens and requests of a run at a price per hour of the machine.

All of the machine's time is charged to the output: either to output tokens alone, or split between
input and output tokens by the time that requests spent in prefill and in decode.
"""

from __future__ import annotations

import math

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.latency import outcome
from ridgeline.measure.metrics.summary import Summary
from ridgeline.records import RunTrace
from ridgeline.records.price import dollars_per_million, dollars_per_unit
from ridgeline.report.numbers import rounded


class RunCost(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars; None if nothing was produced. `*_split`: prefill time is charged to input tokens."""

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
) -> RunCost:
    """Cost at these rates. `prefill_share` is the share of time spent on prompts; None: unknown.

    Raises BadInput for a negative price.
    """
    if not (math.isfinite(dollars_per_hour) and dollars_per_hour >= 0):
        raise BadInput("the price per hour must not be negative", value=dollars_per_hour)

    def tokens(tok_s: float, share: float | None = 1.0) -> float | None:
        return None if share is None else dollars_per_million(dollars_per_hour, tok_s, share)

    rest = None if prefill_share is None else 1 - prefill_share
    good = None if goodput_req_s is None else dollars_per_unit(dollars_per_hour, goodput_req_s)
    return RunCost(
        dollars_per_hour=dollars_per_hour,
        per_million_output=tokens(output_tok_s),
        per_million_input_split=tokens(input_tok_s, prefill_share),
        per_million_output_split=tokens(output_tok_s, rest),
        per_request=dollars_per_unit(dollars_per_hour, request_rate),
        per_good_request=good,
    )


def cost_of_run(run: RunTrace, summary: Summary, dollars_per_hour: float | None) -> RunCost | None:
    """What the run cost per token and request; None without a price.

    An hour of a twin is as many hours of its devices as its speed says.
    """
    if dollars_per_hour is None:
        return None
    speed = 1.0 if run.info is None else run.info.twin_speed
    return cost_of(
        dollars_per_hour * speed,
        input_tok_s=summary.input_tok_s,
        output_tok_s=summary.output_tok_s,
        request_rate=summary.request_rate,
        goodput_req_s=summary.goodput.goodput_req_s if summary.goodput else None,
        prefill_share=prefill_share(run),
    )


def prefill_share(run: RunTrace) -> float | None:
    """Share of the time of requests that passed before their first token; None if unknown."""
    served = [r for r in run.requests if outcome(r) == "ok" and r.token_s]
    starts = [r.started_s if r.started_s is not None else r.sent_s for r in served]
    first = sum(r.token_s[0] - start for r, start in zip(served, starts, strict=True))
    whole = sum(r.token_s[-1] - start for r, start in zip(served, starts, strict=True))
    return first / whole if whole > 0 else None


def cost_line(cost: RunCost) -> str:
    """One line for the console: ways to charge the whole bill, each of which adds up to it."""
    parts = [
        (cost.per_million_output, "1M output tokens"),
        (cost.per_request, "a request"),
        (cost.per_good_request, "a request within the SLO"),
    ]
    costs = [f"${rounded(value, 4)} for {what}" for value, what in parts if value is not None]
    split_in, split_out = cost.per_million_input_split, cost.per_million_output_split
    if split_in is not None and split_out is not None:
        costs.append(
            f"${rounded(split_in, 4)} for 1M input and ${rounded(split_out, 4)} for 1M output "
            "tokens (by time in prefill and decode)"
        )
    charged = ", or ".join(costs) or "nothing was produced"
    return f"cost at ${cost.dollars_per_hour:g}/h: {charged}"
