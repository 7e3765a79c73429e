"""Budgets as people write them: 90, 90s, 5m, 4m30s, 1h."""

from __future__ import annotations

import re

from ridgeline.errors import BadInput

_FORM = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?$")


def parse_seconds(text: str, flag: str = "--budget") -> float:
    """Seconds; BadInput for anything else, or nothing, or zero."""
    match = _FORM.match(text.strip())
    hours, minutes, rest = match.groups() if match else (None, None, None)
    total_s = 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(rest or 0)
    if total_s <= 0:
        raise BadInput(
            f"{flag} is not a duration", value=text, limit="> 0, e.g. 270, 90s, 5m, 4m30s, 1h"
        )
    return total_s


def minutes_and_seconds(seconds: float) -> str:
    """4:07."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
