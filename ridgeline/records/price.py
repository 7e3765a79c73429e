"""How a device is paid for, and dollars per token and per request from dollars per hour."""

from __future__ import annotations

from typing import Literal

HOUR_S = 3600.0
MILLION = 1e6

Commitment = Literal["on-demand", "spot", "reserved-1y", "reserved-3y", "owned"]
"""How a device is paid for; `owned` is an amortised cost of ownership, power included."""


def dollars_per_unit(dollars_per_hour: float, per_s: float) -> float | None:
    """Cost of one unit at `per_s` units per second; None if the rate is 0."""
    return dollars_per_hour / HOUR_S / per_s if per_s > 0 else None


def dollars_per_million(dollars_per_hour: float, tok_s: float, share: float = 1.0) -> float | None:
    """Cost of a million tokens at `tok_s`, charged `share` of the hour; None if the rate is 0."""
    per_token = dollars_per_unit(dollars_per_hour, tok_s)
    return None if per_token is None else per_token * share * MILLION
