"""Numbers on a server's command line, as its own parser reads them."""

from __future__ import annotations

import re

from ridgeline.config.units import parse_count
from ridgeline.twin.servers import refusal
from ridgeline.twin.servers.flag_table import FlagTable

_SCALED = re.compile(r"\d+(?:\.\d+)?[kmgt]|\d+[KMGT]")
_STOI = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_UNSIGNED = re.compile(r"\+?[0-9]+")
_C_INTS = range(-(2**31), 2**31)


def read_number(table: FlagTable, flag: str, value: str, *, is_float: bool) -> str:
    """The value of a flag that takes a number, in digits. Raises CommandRefused."""
    try:
        return repr(_float(table, value)) if is_float else str(_int(table, flag, value))
    except ValueError:
        raise refusal.no_number(table, flag, value, is_float=is_float) from None


def _int(table: FlagTable, flag: str, value: str) -> int:
    if table.parser == "llama.cpp":  # std::stoi ignores what follows the digits
        found = _STOI.match(value)
        if found is None or int(found[1]) not in _C_INTS:
            raise ValueError(value)
        return int(found[1])
    if table.parser == "clap" and not _UNSIGNED.fullmatch(value):
        raise ValueError(value)
    if flag in table.scaled and _SCALED.fullmatch(value.strip()):
        return parse_count(value.strip())
    return int(value)


def _float(table: FlagTable, value: str) -> float:
    if table.parser == "clap" and ("_" in value or value != value.strip()):
        raise ValueError(value)
    return float(value)
