"""Recorded loads: arrival times and lengths of prompts and answers.

    azure:FILE.csv         TIMESTAMP,ContextTokens,GeneratedTokens        (2023, 2024)
    burstgpt:FILE.csv      Timestamp,…,Request tokens,Response tokens,…   (BurstGPT;
                           rows with a response of 0 tokens failed and are skipped)
    mooncake:FILE.jsonl    {"timestamp": ms, "input_length", "output_length", "hash_ids"}

Azure and BurstGPT record lengths only: their prompts are random token ids without shared prefixes.
In a Mooncake trace each hash id is a block of 512 tokens, and equal ids are equal blocks, so that
the shared prefixes of the trace are reproduced.

Requests keep the order of the file. With `--replay-speed k` they also keep its arrival times, k
times as fast; otherwise the trace only provides the lengths. A sample longer than the file starts
over with different tokens.
"""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.units import MAX_LENGTH
from ridgeline.errors import DECODE_ERRORS, BadInput
from ridgeline.measure.workload.base import LoadRequest
from ridgeline.measure.workload.synthetic import FIRST_ID

MOONCAKE_BLOCK = 512
VOCAB = 2048


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request. `blocks`: hash ids of its prompt's blocks, () if unknown."""

    at_s: float
    num_input: int
    num_output: int
    blocks: tuple[int, ...] = ()


class TraceWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a file, ordered by arrival."""

    name: str
    rows: tuple[TraceRow, ...]

    @property
    def at_s(self) -> tuple[float, ...]:
        """Arrival times in seconds on the clock of the trace."""
        return tuple(row.at_s for row in self.rows)

    def sample(self, n: int, seed: int) -> Iterator[LoadRequest]:
        for index in range(n):
            row = self.rows[index % len(self.rows)]
            yield LoadRequest(
                id=f"{seed}-{index}",
                kind=self.name.partition(":")[0],
                prompt=_tokens(row, f"{seed}/{index}", index // len(self.rows)),
                max_tokens=row.num_output,
            )


def _tokens(row: TraceRow, request_seed: str, repetition: int) -> tuple[int, ...]:
    """Tokens of blocks follow from their hash ids; the rest is unique to the request."""
    tokens: list[int] = []
    for block in row.blocks:
        tokens += _ids(f"block/{block}/{repetition}", MOONCAKE_BLOCK)
    tokens = tokens[: row.num_input]
    return (*tokens, *_ids(request_seed, row.num_input - len(tokens)))


def _ids(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, VOCAB), k=count)


def azure(path: str) -> TraceWorkload:
    """Read an Azure trace. Raises BadInput if a column is missing or a value is not a number."""
    rows = [
        _row(where, _seconds(where, row["TIMESTAMP"]), *_counts(where, row, _AZURE))
        for where, row in _csv(path, _AZURE)
    ]
    return _workload("azure", path, rows)


def burstgpt(path: str) -> TraceWorkload:
    rows = [
        _row(where, _number(where, row["Timestamp"]), *_counts(where, row, _BURSTGPT))
        for where, row in _csv(path, _BURSTGPT)
        if (row["Response tokens"] or "").strip() != "0"
    ]
    return _workload("burstgpt", path, rows)


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def mooncake(path: str) -> TraceWorkload:
    rows = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=_Mooncake)
        except DECODE_ERRORS as error:
            raise BadInput(f"{path}:{number}: not a line of a Mooncake trace ({error})") from None
        lengths = (record.input_length, record.output_length)
        at_s, blocks = record.timestamp / 1000, tuple(record.hash_ids)
        rows.append(_row(f"{path}:{number}", at_s, *lengths, blocks))
    return _workload("mooncake", path, rows)


def _workload(kind: str, path: str, rows: Sequence[TraceRow]) -> TraceWorkload:
    served = [row for row in rows if row.num_input > 0 and row.num_output > 0]
    if not served:
        raise BadInput("the trace has no requests", value=path)
    ordered = sorted(served, key=lambda row: row.at_s)
    return TraceWorkload(name=f"{kind}:{path}", rows=tuple(ordered))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the trace", value=path, fix=str(error)) from None


def _csv(path: str, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    reader = csv.DictReader(io.StringIO(_read(path)))
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            limit, fix = ", ".join(needed), f"add {missing[0]}"
            raise BadInput("the trace has no such column", value=path, limit=limit, fix=fix)
        for number, row in enumerate(reader, 2):
            yield f"{path}:{number}", row
    except csv.Error as error:
        raise BadInput("cannot read the trace", value=path, fix=str(error)) from None


def _row(
    where: str, at_s: float, num_input: int, num_output: int, blocks: tuple[int, ...] = ()
) -> TraceRow:
    for count in (num_input, num_output):
        if not 0 <= count <= MAX_LENGTH:
            raise BadInput(
                f"{where}: the number of tokens is out of range",
                value=count,
                limit=f"0 to {MAX_LENGTH}",
            )
    return TraceRow(at_s, num_input, num_output, blocks)


def _counts(where: str, row: dict[str, Any], names: Sequence[str]) -> tuple[int, int]:
    """The last two columns as integers."""
    num_input, num_output = (int(_number(where, row[name])) for name in names[-2:])
    return num_input, num_output


def _number(where: str, text: str | None) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{where}: not a number", value=text)
    return number


def _seconds(where: str, text: str | None) -> float:
    """Seconds of a timestamp. Azure writes 7 decimal digits, one more than datetime reads."""
    try:
        whole, _, fraction = (text or "").partition(".")
        digits = fraction.partition("+")[0]
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{digits or 0}")
    except ValueError:
        raise BadInput(f"{where}: not a timestamp", value=text) from None
