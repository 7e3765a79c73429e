"""`ridgeline predict`: one point as a table, or many as JSONL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import Accelerator, load_catalogue
from ridgeline.plan.calibration.calibration import MeasuredDevice, load_calibration
from ridgeline.plan.calibration.remote_server import Told, load_served, predict_served
from ridgeline.plan.model.outline import known_shapes
from ridgeline.plan.step_time.predict import Point, Prediction, predict, predict_lines
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line

MENDABLE = 2


def read_catalogue(path: Path | None, calibration: Path | None = None) -> dict[str, Accelerator]:
    """The user's catalogue, or Ridgeline's; with a calibration's device in front, if one is named.

    BadInput for a file that cannot be read.
    """
    measured = None if calibration is None else load_calibration(calibration).accelerator()
    rows = {} if measured is None else {measured.name: measured}
    if path is None:
        return {**rows, **load_catalogue()}
    try:
        return {**rows, **load_catalogue(path.read_text(encoding="utf-8"))}
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the catalogue", value=str(path), fix=str(error)) from None


def chosen_device(asked: str | None, rows: dict[str, Accelerator]) -> str | None:
    """The device as asked; without, the measured one, where there is one."""
    measured = (row.name for row in rows.values() if isinstance(row, MeasuredDevice))
    return asked or next(measured, None)


def answer_one(point: Point, rows: dict[str, Accelerator], as_json: bool) -> None:
    """Print one prediction. Raises UserError where the point cannot be run."""
    found = predict(point, rows)
    if as_json:
        print(json_line(found))
        return
    Console(highlight=False).print(_table(point, found))


def answer_served(path: Path, point: Point, other: object, as_json: bool) -> None:
    """As `answer_one`, from a calibration of a server: isl, osl and batch decide, nothing else."""
    served = load_served(path)
    plain = Point(model=point.model, device="", isl=point.isl, osl=point.osl, batch=point.batch)
    idle = [
        name for name in point.__struct_fields__ if getattr(point, name) != getattr(plain, name)
    ]
    if idle or other is not None or point.model not in ("", served.model):
        raise BadInput(
            "a calibration of a server answers about that server and its model alone",
            value=", ".join(idle) or other or point.model,
            limit="--isl, --osl, --batch",
            fix=f"leave out the rest (it serves {served.model})",
        )
    found = predict_served(served, point.isl, point.osl, point.batch)
    if as_json:
        print(json_line(found))
        return
    where = f"{served.model} at {served.server}, calibrated {served.as_of}"
    title = f"{where}: {point.batch} x {point.isl} in, {point.osl} out"
    table = _empty(title)
    _add_times(table, found)
    table.add_row("decode step", f"{found.decode_ms:,.4g} ms", "")
    Console(highlight=False).print(table)


def answer_file(source: str, output: Path | None, rows: dict[str, Accelerator]) -> int:
    """Answer every line; 2 where any could not be answered."""
    failed = False

    def lines() -> Iterator[str]:
        nonlocal failed
        for told in predict_lines(_lines(source), lambda point: predict(point, rows)):
            failed |= "error" in told
            yield json_line(told)

    if output is not None:
        write_file(output, (f"{line}\n".encode() for line in lines()))
    else:
        for line in lines():
            print(line)
    return MENDABLE if failed else 0


def list_known(rows: dict[str, Accelerator]) -> None:
    """Names that `predict` and `plan` take."""
    out = Console(highlight=False)
    out.print("models:  " + " ".join(known_shapes()))
    out.print("devices: " + " ".join(rows))


def _lines(source: str) -> Iterator[str]:
    if source == "-":
        yield from sys.stdin
        return
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("cannot read the points", value=source, fix=str(error)) from None
    yield from text.split("\n")


def _table(point: Point, found: Prediction) -> Table:
    title = f"{point.model} on {point.device}, {point.batch} x {point.isl} in, {point.osl} out"
    table = _empty(title)
    _add_times(table, found)
    table.add_row("decode step", f"{found.decode_ms:,.4g} ms", f"bound by {found.bound}")
    table.add_row("prefill", "", f"bound by {found.prefill_bound}")
    table.add_row("MBU, MFU of decode", f"{found.mbu:.1%}, {found.mfu:.1%}", found.compute_dtype)
    table.add_row("KV cache holds", f"{found.kv_tokens_max:,} tokens", "")
    return table


def _empty(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, style in (("", "dim"), ("predicted", "bold"), ("80 % interval", "")):
        table.add_column(name, style=style, justify="left" if not name else "right")
    return table


def _add_times(table: Table, found: Prediction | Told) -> None:
    for label, name, unit in (
        ("time to first token", "ttft_ms", "ms"),
        ("per output token", "tpot_ms", "ms"),
        ("output", "output_tok_s", "tok/s"),
    ):
        low, high = found.interval[name]
        table.add_row(label, f"{getattr(found, name):,.4g} {unit}", f"{low:,.4g} .. {high:,.4g}")
