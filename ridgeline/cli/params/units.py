"""Counts, sizes and times as people write them: `8k`, `4G`, `512MiB`, `4m30s`.

A suffix means what vLLM means by it: small k, m, g, t are powers of 1000, capital K, M, G, T
powers of 1024. With a B it is a size in bytes: kB, MB, GB, TB decimal, KiB, MiB, GiB, TiB binary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ridgeline.errors import BadInput

_SCALES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

_NUMBER = r"(\d+(?:\.\d+)?)"
_TIME = re.compile(rf"(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s?)?")


def count_of(flag: str) -> Callable[[str], int]:
    """A parser for `flag` that reads 4096, 4k (4000) and 4K (4096)."""
    return lambda text: _read(flag, text, "a whole number, or one with k, m, K or M, e.g. 8K")


def size_of(flag: str) -> Callable[[str], int]:
    """A parser for `flag` that reads bytes: 1073741824, 1G, 1GiB, 512MiB."""
    return lambda text: _read(flag, text, "bytes, or a number with KiB, MiB, GiB, MB or GB")


def duration_of(flag: str) -> Callable[[str], float]:
    """A parser for `flag` that reads seconds: 90, 90s, 5m, 4m30s, 1h."""

    def read(text: str) -> float:
        found = _TIME.fullmatch(text.strip())
        parts = [float(part) if part else 0.0 for part in found.groups()] if found else []
        seconds = sum(part * scale for part, scale in zip(parts, (3600, 60, 1), strict=False))
        if seconds <= 0:
            raise BadInput(f"{flag} is not a time", value=text, limit="e.g. 90s, 5m, 4m30s, 1h")
        return seconds

    return read


def one_of(flag: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    """A parser for `flag` that accepts only `choices`."""

    def read(text: str) -> str:
        if text not in choices:
            raise BadInput(f"{flag} has no such choice", value=text, limit=", ".join(choices))
        return text

    return read


def table_of(flag: str) -> Callable[[str], dict[str, Any]]:
    """A parser for `flag` that reads a JSON object."""

    def read(text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadInput(f"{flag} is not JSON", value=text, fix=str(error)) from None
        if not isinstance(found, dict):
            raise BadInput(f"{flag} is not a JSON object", value=text, fix='write {"key": value}')
        return found

    return read


def _read(flag: str, text: str, form: str) -> int:
    found = _FORM.fullmatch(text)
    scale = _SCALES.get(found[2]) if found else None
    if found is None or scale is None:
        raise BadInput(f"{flag} is not a quantity", value=text, limit=form)
    value = float(found[1]) * scale
    if value != int(value):
        raise BadInput(f"{flag} is not a whole number", value=text, limit=form)
    return int(value)
