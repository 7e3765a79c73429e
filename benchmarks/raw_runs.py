"""Measurements kept raw in a file, line by line, so that a run may stop and go on later.

`bench_predict.py` and `bench_simulate.py` measure for longer than one sitting may take: every
finished piece is appended at once, what is there is not measured again, and a line that a kill cut
short is dropped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

NOT_DONE = 3  # exit code of `measure` while pieces are missing
SITTING_S = 480.0
T = TypeVar("T")


def read(path: Path, kind: type[T]) -> list[T]:
    """Every whole line of the file; none where there is no file."""
    if not path.exists():
        return []
    return [
        msgspec.json.decode(line, type=kind)
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def append(path: Path, records: Iterable[msgspec.Struct]) -> None:
    """Add records, all in one write, behind the last whole line."""
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    old = path.read_bytes() if path.exists() else b""
    if old and not old.endswith(b"\n"):
        path.write_bytes(old[: old.rfind(b"\n") + 1])
    with path.open("ab") as stream:
        stream.write(lines)


def flags(doc: str, *tables: str) -> argparse.ArgumentParser:
    """The `measure` command and its evaluations; the caller may add flags."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", *tables))
    parser.add_argument("--raw", type=Path, required=True, help="the file of measurements")
    parser.add_argument(
        "--seconds", type=float, default=SITTING_S, help="most of one sitting (exit 3: go on)"
    )
    parser.add_argument("--calibration", type=Path, help="FILE of a calibration")
    return parser


def say(lines: Iterable[str]) -> int:
    """Print; the exit code."""
    for line in lines:
        sys.stdout.write(line + "\n")
    return 0
