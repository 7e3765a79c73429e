"""The line of a server's log that says why it failed."""

from __future__ import annotations

import re

MAX_CHARS = 300
_EXCEPTION = re.compile(r"\b(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b: *\S")
_ERROR = re.compile(
    r"\b(?:error|fatal|panic(?:ked)?|failed to|out of memory|unrecognized|no such|segmentation"
    r" fault|killed)\b",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"\b(?:DEBUG|INFO|WARN(?:ING)?)\b|\braise \w|\bFile \"|\^\^")
_REFERS_BACK = re.compile(r"\b(?:cause|trace(?:back)?)\W+above\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def last_error(log: str) -> str:
    """The last line of a log that names an exception or an error, else its last line.

    An exception raised while another was handled is the later one, so the last is what ended the
    process. Passed over: lines logged as warnings or less, source lines of a traceback, and errors
    that only refer to "the root cause above". At most `MAX_CHARS` characters, without terminal
    colours; "" for an empty log.
    """
    lines = [line.strip() for line in _COLOUR.sub("", log).splitlines() if line.strip()]
    for line in reversed(lines):
        if _HARMLESS.search(line) or _REFERS_BACK.search(line):
            continue
        if found := _EXCEPTION.search(line):
            return _short(line[found.start() :])
        if _ERROR.search(line):
            return _short(line)
    return _short(lines[-1]) if lines else ""


def _short(line: str) -> str:
    return line if len(line) <= MAX_CHARS else line[: MAX_CHARS - 1] + "…"
