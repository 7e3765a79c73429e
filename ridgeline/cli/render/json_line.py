"""What --json prints: one line of JSON that every reader takes.

JSON has no infinity and no NaN; both are null: a number that is not known, or that is beyond all
bounds (a first token that never comes). Python's own `json` writes bare words for them, which no
other reader takes; hence everything that the command line prints for machines comes through here.
"""

from __future__ import annotations

import msgspec


def json_line(value: object) -> str:
    """Records, and what is built of dicts, lists and plain values."""
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _plain(value: object) -> object:
    """NumPy's float64 is a float, but not the very type."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"not for JSON: {type(value).__name__}")
