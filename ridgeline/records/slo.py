"""Service-level objectives: `ttft:200 tpot:50` (milliseconds), as in vLLM's `--goodput`."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ridgeline.errors import BadInput

Miss = Literal["unobserved", "ttft", "tpot", "e2e"]
_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}
_FIX = "write for example 'ttft:200 tpot:50 error:1%' (milliseconds; error as a share)"


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Latency limits per request in seconds (None: no limit), and the shares that may miss them.

    `error_rate` is the largest share of requests that may fail. `attainment` is the share of
    requests that must meet every limit for the SLO to hold.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    error_rate: float = 0.0
    attainment: float = 0.95

    @staticmethod
    def parse(text: str) -> Slo:
        """Parse `ttft:MS tpot:MS e2e:MS error:SHARE attainment:SHARE`; at least one latency.

        Raises BadInput.
        """
        fields: dict[str, float] = {}
        for part in text.replace(",", " ").split():
            name, value = _parse_part(part)
            if name in fields:
                raise BadInput(f"the SLO names {name} twice", value=text, fix=_FIX)
            fields[name] = value
        if not {"ttft_s", "tpot_s", "e2e_s"} & fields.keys():
            raise BadInput("the SLO has no latency limit", value=text, fix=_FIX)
        return Slo(**fields)

    @property
    def objectives(self) -> tuple[Miss, ...]:
        """What a request can miss."""
        limits: tuple[tuple[Miss, float | None], ...] = (
            ("ttft", self.ttft_s),
            ("tpot", self.tpot_s),
            ("e2e", self.e2e_s),
        )
        limited = tuple(name for name, limit in limits if limit is not None)
        return limited if self.ttft_s or self.e2e_s else (*limited, "unobserved")

    def misses(
        self, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
    ) -> tuple[Miss, ...]:
        """The limits that a successful request exceeded; () if it met the SLO.

        Latencies that could not be observed (None: TPOT of a one-token answer) are not checked. If
        none could be, the request counts as missed: ("unobserved",).
        """
        pairs: tuple[tuple[Miss, float | None, float | None], ...] = (
            ("ttft", ttft_s, self.ttft_s),
            ("tpot", tpot_s, self.tpot_s),
            ("e2e", e2e_s, self.e2e_s),
        )
        checked = [
            (name, v, limit) for name, v, limit in pairs if v is not None and limit is not None
        ]
        if not checked:
            return ("unobserved",)
        return tuple(name for name, value, limit in checked if value > limit)

    def __str__(self) -> str:
        parts = [
            f"{name}:{value * 1000:g}"
            for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s))
            if value is not None
        ]
        return " ".join([*parts, f"error:{self.error_rate:g}", f"attainment:{self.attainment:g}"])


def _parse_part(part: str) -> tuple[str, float]:
    name, colon, raw = part.partition(":")
    if not colon or not raw:
        raise BadInput("an SLO part needs the form name:value", value=part, fix=_FIX)
    if name in _LATENCIES:
        milliseconds = _number(part, raw)
        if milliseconds <= 0:
            raise BadInput("an SLO latency must be positive", value=part, limit="> 0 ms", fix=_FIX)
        return _LATENCIES[name], milliseconds / 1000
    if name in ("error", "attainment"):
        share = _number(part, raw[:-1]) / 100 if raw.endswith("%") else _number(part, raw)
        if not 0 <= share <= 1:
            raise BadInput("an SLO share must lie in 0..1", value=part, limit="0..1", fix=_FIX)
        return ("error_rate" if name == "error" else "attainment"), share
    known = ", ".join([*_LATENCIES, "error", "attainment"])
    raise BadInput("an SLO names an unknown metric", value=part, limit=known, fix=_FIX)


def _number(part: str, raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        raise BadInput("an SLO value is not a number", value=part, fix=_FIX) from None
    if not math.isfinite(value):
        raise BadInput("an SLO value must be finite", value=part, fix=_FIX)
    return value
