"""A latency promise: `ttft:200 tpot:50` (milliseconds), as vLLM's `--goodput` writes it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ridgeline.errors import BadInput

Miss = Literal["unobserved", "ttft", "tpot", "e2e"]
_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}
_FIX = "write e.g. 'ttft:200 tpot:50 error:1%' (milliseconds; error as a share)"


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per request in seconds (None: not promised), and the share of requests that may miss.

    `error_rate` is the largest share of requests that may fail outright. `attainment` is the share
    of requests that must meet every limit for the SLO to hold.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    error_rate: float = 0.0
    attainment: float = 0.95

    @staticmethod
    def parse(text: str) -> Slo:
        """Read `ttft:MS tpot:MS e2e:MS error:SHARE attainment:SHARE`; one latency is needed."""
        found: dict[str, float] = {}
        for part in text.replace(",", " ").split():
            name, value = _parse_part(part)
            if name in found:
                raise BadInput(f"the SLO names {name} twice", value=text, fix=_FIX)
            found[name] = value
        if not {"ttft_s", "tpot_s", "e2e_s"} & found.keys():
            raise BadInput("the SLO promises no latency", value=text, fix=_FIX)
        return Slo(**found)

    def misses(
        self, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
    ) -> tuple[Miss, ...]:
        """Why a request that succeeded did not keep this promise; () where it did.

        What could not be observed (None: TPOT of a one-token answer) is not judged; where nothing
        could be, the request counts as missed: a promise is kept only where that was seen.
        """
        pairs: tuple[tuple[Miss, float | None, float | None], ...] = (
            ("ttft", ttft_s, self.ttft_s),
            ("tpot", tpot_s, self.tpot_s),
            ("e2e", e2e_s, self.e2e_s),
        )
        judged = [(name, v, most) for name, v, most in pairs if v is not None and most is not None]
        if not judged:
            return ("unobserved",)
        return tuple(name for name, value, most in judged if value > most)

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
