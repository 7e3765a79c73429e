"""Time as shown by a display."""

from __future__ import annotations


def minutes_and_seconds(seconds: float) -> str:
    """For example 4:07."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
