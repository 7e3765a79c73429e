"""Quantities as people write them: `8k` tokens, `4GiB`, `4m30s`, `12.5` requests per second.

A suffix means what it means to vLLM: lower-case k, m, g, t are powers of 1000, upper-case K, M, G,
T powers of 1024. Followed by B it is a size in bytes: kB, MB, GB, TB decimal, KiB, MiB, GiB, TiB
binary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf

import msgspec

_SCALES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"(?:{_NUMBER}h)?(?:{_NUMBER}m(?!s))?(?:{_NUMBER}s)?(?:{_NUMBER}ms)?")


def parse_count(text: str) -> int:
    """4096, 4k (4000) or 4K (4096). Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    scale = _SCALES.get(match[2]) if match else None
    if match is None or scale is None:
        raise ValueError(text)
    if "." not in match[1]:
        return int(match[1]) * scale  # exact, however large
    value = float(match[1]) * scale
    if value != int(value):
        raise ValueError(text)
    return int(value)


def parse_number(text: str) -> float:
    """Any number, `inf` included. Raises ValueError."""
    return float(text)


def parse_duration(text: str) -> float:
    """Seconds: 90, 90s, 5m, 4m30s, 1h or 250ms. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        pass
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise ValueError(text)
    scales = (3600.0, 60.0, 1.0, 0.001)
    return sum(
        float(part) * scale for part, scale in zip(match.groups(), scales, strict=True) if part
    )


def _plain(number: float) -> str:
    """A number with its decimals, if it has any, and never with an exponent."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,g}"


class Range(msgspec.Struct, frozen=True):
    """The values that a number may have; `minimum` itself only unless `exclusive`."""

    minimum: float
    maximum: float = inf
    exclusive: bool = False

    def contains(self, value: float) -> bool:
        """False for NaN."""
        return self.minimum <= value <= self.maximum and not (
            self.exclusive and value == self.minimum
        )

    def __str__(self) -> str:
        """Both ends, without those that no real value comes near."""
        return ", ".join(filter(None, (self._lower, self._upper if self.maximum < 1e9 else "")))

    def bound_of(self, value: float) -> str:
        """The end of the range that `value` is beyond."""
        if value > self.maximum:
            return self._upper
        return self._lower or self._upper

    @property
    def _lower(self) -> str:
        if self.minimum == -inf:
            return ""
        return f"{'>' if self.exclusive else '>='} {self.minimum:,g}"

    @property
    def _upper(self) -> str:
        return f"<= {_plain(self.maximum)}" if self.maximum < inf else "a finite number"


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What a number measures: how it is written, read and bounded.

    `metavar` is its placeholder in help texts; `form` describes the accepted spellings.
    """

    metavar: str
    parse: Callable[[str], float]
    range: Range
    form: str


MAX_COUNT = 10**12  # no machine comes near this many tokens, requests or steps
MAX_LENGTH = 10_000_000  # tokens of a prompt or an answer, or all prefixes together
MAX_REQUESTS = 10_000_000  # prompts of a load are generated before the first is sent
MAX_REPLICAS = 10_000
MAX_BYTES = 1 << 60
MAX_SECONDS = 1e9  # thirty years
MAX_DOLLARS = 1e12
MAX_SEED = 1 << 62  # runs add their index to the seed, which must stay within 64 bits

_COUNT_FORM = "a whole number, also with k, m (1000, 1000²) or K, M (1024, 1024²)"
_DURATION_FORM = "seconds, or a duration such as 90s, 5m, 4m30s, 1h"

COUNT = Unit(metavar="N", parse=parse_count, range=Range(1, MAX_COUNT), form=_COUNT_FORM)
TOKENS = msgspec.structs.replace(COUNT, metavar="TOKENS")
BYTES = Unit(
    metavar="BYTES",
    parse=parse_count,
    range=Range(1, MAX_BYTES),
    form="bytes, also with KiB, MiB, GiB, MB or GB",
)
DURATION = Unit(
    metavar="TIME",
    parse=parse_duration,
    range=Range(0, MAX_SECONDS, exclusive=True),
    form=_DURATION_FORM,
)
MILLISECONDS = Unit(
    metavar="MS",
    parse=parse_number,
    range=Range(0, 1000 * MAX_SECONDS),
    form="a number of milliseconds",
)
RATE = Unit(
    metavar="RATE",
    parse=parse_number,
    range=Range(0, 1e9, exclusive=True),
    form="a number of requests per second",
)
NUMBER = Unit(metavar="X", parse=parse_number, range=Range(-inf, inf), form="a number")
SHARE = Unit(metavar="SHARE", parse=parse_number, range=Range(0, 1), form="a share from 0 to 1")
PERCENT = Unit(metavar="PERCENT", parse=parse_number, range=Range(0, 1e6), form="percent")
DOLLARS = Unit(
    metavar="USD", parse=parse_number, range=Range(0, MAX_DOLLARS), form="a number of dollars"
)
SEED = Unit(metavar="SEED", parse=parse_count, range=Range(0, MAX_SEED), form="a whole number")
PORT = Unit(metavar="PORT", parse=parse_count, range=Range(0, 65535), form="a port number")

NON_NEGATIVE_COUNT = Range(0, MAX_COUNT)
NON_NEGATIVE_SECONDS = Range(0, MAX_SECONDS)
POSITIVE_DOLLARS = Range(0, MAX_DOLLARS, exclusive=True)
