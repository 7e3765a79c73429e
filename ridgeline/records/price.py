"""Dollars per token and per request from dollars per hour: the one place where it is divided.

The bench, the optimiser, the sizing and the cost command all count with these two.
"""

from __future__ import annotations

HOUR_S = 3600.0
MILLION = 1e6


def dollars_each(dollars_per_hour: float, per_s: float) -> float | None:
    """What one of `per_s` things a second costs; None where nothing comes out."""
    return dollars_per_hour / HOUR_S / per_s if per_s > 0 else None


def dollars_per_million(dollars_per_hour: float, tok_s: float, share: float = 1.0) -> float | None:
    """A million tokens at `tok_s`, charged with `share` of the hour."""
    each = dollars_each(dollars_per_hour, tok_s)
    return None if each is None else each * share * MILLION
