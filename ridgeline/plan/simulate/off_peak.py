"""Off-peak windows: when batch requests may be served, on the simulation's virtual clock."""

from __future__ import annotations

import re

import msgspec

from ridgeline.errors import BadInput

DAY_S = 24 * 3600.0
_FORM = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})(?:@(\d{1,2}):(\d{2}))?")


class OffPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Every day from `from_s` to `to_s` (which may lie before it: past midnight); the clock's zero
    is `zero_s` into a day."""

    from_s: float
    to_s: float
    zero_s: float = 0.0

    @staticmethod
    def parse(text: str) -> OffPeak:
        """`22:00-06:00`, or with the time of day at which the simulation begins `@18:30`."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise BadInput("an off-peak window is not understood", value=text, limit="22:00-06:00")
        parts = [int(part or 0) for part in found.groups()]
        if any(hour > 24 for hour in parts[::2]) or any(minute > 59 for minute in parts[1::2]):
            raise BadInput("an off-peak window has no such time", value=text, limit="00:00..24:00")
        begins, ends, zero = (
            3600.0 * h + 60.0 * m for h, m in zip(*[iter(parts)] * 2, strict=True)
        )
        if begins % DAY_S == ends % DAY_S:
            raise BadInput("an off-peak window is empty, or the whole day", value=text)
        return OffPeak(from_s=begins % DAY_S, to_s=ends % DAY_S, zero_s=zero % DAY_S)

    def opens_s(self, at_s: float) -> float:
        """The first instant from `at_s` on that lies in a window."""
        since_s = (at_s + self.zero_s - self.from_s) % DAY_S
        if since_s < (self.to_s - self.from_s) % DAY_S:
            return at_s
        return at_s + DAY_S - since_s
