"""A RunTrace as one Parquet table, for SQL and data frames.

    type                "request" or "step": its columns are filled, the others are null
    id … first_computed_s   fields of RequestTrace
    index … hit_tokens      fields of StepStat; `shapes` is a list of [new, cached]

The header of the event log is stored as JSON in the file's metadata, under `ridgeline`. Columns
follow from the records, so that a new field becomes a new column. The content is that of the JSONL
log, and `read_run` reads both. Worthwhile above some ten thousand requests.

Written by pyarrow, the reference implementation, which data frames already use. It takes 170 MB on
disk and is therefore an extra that only this module imports.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ridgeline.errors import BadInput, CannotRun
from ridgeline.records import RequestTrace, RunTrace, StepStat

SUFFIX, MAGIC = ".parquet", b"PAR1"
_METADATA = b"ridgeline"
_ROWS: dict[str, type[msgspec.Struct]] = {"request": RequestTrace, "step": StepStat}
T = TypeVar("T")


def is_parquet(path: Path) -> bool:
    """Whether a file of this name is written as Parquet."""
    return path.suffix == SUFFIX


def load_pyarrow(path: Path) -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet. Raises CannotRun if they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CannotRun(
            "Parquet needs pyarrow, which is not installed",
            value=str(path),
            fix="pip install 'ridgeline[parquet]', or name the file .jsonl",
        ) from None
    return pyarrow, pyarrow.parquet


def encode(run: RunTrace, header: bytes, path: Path) -> bytes:
    """The content of the file. `header` is JSON; `path` is only for errors."""
    arrow, parquet = load_pyarrow(path)
    columns = {"type": arrow.string()}
    for record in _ROWS.values():
        columns |= {name: _column(arrow, kind) for name, kind in get_type_hints(record).items()}
    rows = [{"type": "request", **msgspec.to_builtins(request)} for request in run.requests]
    rows += [{"type": "step", **msgspec.to_builtins(step)} for step in run.steps]
    schema = arrow.schema(list(columns.items()), metadata={_METADATA: header})
    whole = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema=schema), whole, compression="zstd")
    return whole.getvalue()


def decode(data: bytes, path: Path) -> tuple[bytes, tuple[RequestTrace, ...], tuple[StepStat, ...]]:
    """The header, the requests and the steps of a file that `encode` wrote. Raises BadInput."""
    arrow, parquet = load_pyarrow(path)
    try:
        table = parquet.read_table(io.BytesIO(data))
    except (arrow.ArrowException, OSError) as error:
        raise BadInput("not a Parquet file", value=str(path), fix=str(error)) from None
    header = (table.schema.metadata or {}).get(_METADATA)
    if header is None:
        raise BadInput("the Parquet file is not an event log of `bench --log`", value=str(path))
    rows = table.to_pylist()
    requests = tuple(_record(row, RequestTrace) for row in rows if row["type"] == "request")
    steps = tuple(_record(row, StepStat) for row in rows if row["type"] == "step")
    return header, requests, steps


def _record(row: Mapping[str, Any], kind: type[T]) -> T:
    return msgspec.convert({name: row[name] for name in get_type_hints(kind)}, kind)


def _column(arrow: Any, kind: Any) -> Any:
    """The column type of a field. Raises TypeError for an unsupported type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _column(arrow, next(part for part in parts if part is not NoneType))
    if origin is tuple:
        return arrow.list_(_column(arrow, parts[0]))
    plain = {
        str: arrow.string(),
        int: arrow.int64(),
        float: arrow.float64(),
        bool: arrow.bool_(),
    }
    if origin is Literal:
        return plain[str]
    if kind not in plain:
        raise TypeError(f"no column for {kind!r}")
    return plain[kind]
