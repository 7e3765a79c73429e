"""Time as a display shows it."""

from __future__ import annotations


def minutes_and_seconds(seconds: float) -> str:
    """4:07."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
