"""Off-peak windows: the times of day at which batch requests may be served."""

from __future__ import annotations

import re

import msgspec

from ridgeline.errors import BadInput

DAY_S = 24 * 3600.0
_FORM = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})(?:@(\d{1,2}):(\d{2}))?")


class OffPeak(msgspec.Struct, frozen=True, kw_only=True):
    """A daily window from `from_s` to `to_s`, in seconds of the day; it may span midnight.

    `zero_s` is the time of day at which the virtual clock starts.
    """

    from_s: float
    to_s: float
    zero_s: float = 0.0

    @staticmethod
    def parse(text: str) -> OffPeak:
        """Read `22:00-06:00`, optionally with the time of day at the start: `22:00-06:00@18:30`."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise BadInput("cannot read the off-peak window", value=text, limit="22:00-06:00")
        parts = [int(part or 0) for part in match.groups()]
        if any(hour > 24 for hour in parts[::2]) or any(minute > 59 for minute in parts[1::2]):
            raise BadInput(
                "the off-peak window has an invalid time", value=text, limit="00:00..24:00"
            )
        begins, ends, zero = (
            3600.0 * h + 60.0 * m for h, m in zip(*[iter(parts)] * 2, strict=True)
        )
        if begins % DAY_S == ends % DAY_S:
            raise BadInput("the off-peak window is empty or spans the whole day", value=text)
        return OffPeak(from_s=begins % DAY_S, to_s=ends % DAY_S, zero_s=zero % DAY_S)

    def opens_s(self, at_s: float) -> float:
        """The first time at or after `at_s` that lies in a window."""
        since_s = (at_s + self.zero_s - self.from_s) % DAY_S
        if since_s < (self.to_s - self.from_s) % DAY_S:
            return at_s
        return at_s + DAY_S - since_s
