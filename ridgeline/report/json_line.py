"""JSON for other programs: one line, without infinities and NaN, which JSON does not have.

Both become null: an unknown number, or one beyond all bounds (a first token that never came).
Python's own `json` writes the bare words `Infinity` and `NaN`, which other readers reject.
"""

from __future__ import annotations

from typing import Any

import msgspec


def json_line(value: object) -> str:
    """One line of JSON for records, dicts, lists and plain values."""
    return msgspec.json.encode(value, enc_hook=_to_plain).decode()


def plain(value: object) -> Any:
    """Dicts, lists, strings and numbers with the content of `value`; no infinities or NaN."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_to_plain))


def _to_plain(value: object) -> object:
    if isinstance(value, float):  # NumPy's float64 is a subclass, which msgspec does not accept
        return float(value)
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")
