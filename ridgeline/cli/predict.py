"""`ridgeline predict`: one point as a table, or many as JSONL."""

from __future__ import annotations

import json as json_lib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, load_catalogue
from ridgeline.plan.outline import known_shapes
from ridgeline.plan.predict import Point, Prediction, predict, predict_lines

MENDABLE = 2


def read_catalogue(path: Path | None) -> dict[str, Accelerator]:
    """The user's catalogue, or Ridgeline's."""
    if path is None:
        return load_catalogue()
    try:
        return load_catalogue(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the catalogue", value=str(path), fix=str(error)) from None


def answer_one(point: Point, catalogue: Path | None, as_json: bool) -> None:
    """Print one prediction. Raises UserError where the point cannot be run."""
    found = predict(point, read_catalogue(catalogue))
    if as_json:
        print(json_lib.dumps(msgspec.to_builtins(found)))
        return
    Console(highlight=False).print(_table(point, found))


def answer_file(source: str, output: Path | None, catalogue: Path | None) -> int:
    """Answer every line; 2 where any could not be answered."""
    rows = read_catalogue(catalogue)
    failed = False
    stream = sys.stdout if output is None else output.open("w", encoding="utf-8")
    try:
        for told in predict_lines(_lines(source), lambda point: predict(point, rows)):
            failed |= "error" in told
            print(json_lib.dumps(told), file=stream)
    finally:
        if output is not None:
            stream.close()
    return MENDABLE if failed else 0


def _lines(source: str) -> Iterator[str]:
    if source == "-":
        yield from sys.stdin
        return
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the points", value=source, fix=str(error)) from None
    yield from text.split("\n")


def list_known(catalogue: Path | None) -> None:
    """Names that `predict` and `plan` take."""
    out = Console(highlight=False)
    out.print("models:  " + " ".join(known_shapes()))
    out.print("devices: " + " ".join(read_catalogue(catalogue)))


def _table(point: Point, found: Prediction) -> Table:
    title = f"{point.model} on {point.device}, {point.batch} x {point.isl} in, {point.osl} out"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, style in (("", "dim"), ("predicted", "bold"), ("80 % interval", "")):
        table.add_column(name, style=style, justify="left" if not name else "right")
    for label, name, unit in (
        ("time to first token", "ttft_ms", "ms"),
        ("per output token", "tpot_ms", "ms"),
        ("output", "output_tok_s", "tok/s"),
    ):
        low, high = found.interval[name]
        table.add_row(label, f"{getattr(found, name):,.4g} {unit}", f"{low:,.4g} .. {high:,.4g}")
    table.add_row("decode step", f"{found.decode_ms:,.4g} ms", f"bound by {found.bound}")
    table.add_row("prefill", "", f"bound by {found.prefill_bound}")
    table.add_row("MBU, MFU of decode", f"{found.mbu:.1%}, {found.mfu:.1%}", found.compute_dtype)
    table.add_row("KV cache holds", f"{found.kv_tokens_max:,} tokens", "")
    return table
