"""The tables of `ridgeline catalogue`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ridgeline.cli.render.console import print_prose
from ridgeline.report.numbers import rounded
from ridgeline.workflows.planning.catalogue import CatalogueResult, CatalogueRow, DevicePrice


def print_catalogue(result: CatalogueResult, out: Console, *, one: bool) -> None:
    """One line per device; of a single device all figures and prices."""
    if one:
        _print_device(result.rows[0], out)
    else:
        out.print(_device_table(result))
    for note in result.notes:
        print_prose(out, f"- {note}", "dim")


def _device_table(result: CatalogueResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    whose = (
        "of the cheapest provider that has it on demand, too"
        if result.commitment.startswith("reserved")
        else "of the newest month's median provider"
    )
    table.caption = (
        f"dense TFLOP/s; $/h {result.commitment}, per device, {whose}; * too old to plan with"
    )
    table.add_column("device", no_wrap=True)
    for name in ("GB", "TB/s", "bf16", "fp8", "W", "$/h"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    table.add_column("as of", no_wrap=True)
    for row in result.rows:
        device, chosen = row.device, row.chosen
        table.add_row(
            device.name,
            f"{device.memory_bytes / 1e9:.0f}",
            f"{device.bandwidth_bytes_s / 1e12:.2f}",
            _tflops(row, "bfloat16", "float16"),
            _tflops(row, "float8_e4m3"),
            "" if device.tdp_w is None else f"{device.tdp_w:.0f}",
            "" if chosen is None else f"{chosen.price.usd_per_hour:.2f}{_mark(chosen)}",
            "" if chosen is None else chosen.price.provider,
            "" if chosen is None else chosen.price.as_of,
        )
    return table


def _tflops(row: CatalogueRow, *dtypes: str) -> str:
    peaks = row.device.peak_flops
    return next((f"{peaks[dtype] / 1e12:,.0f}" for dtype in dtypes if dtype in peaks), "")


def _mark(row: DevicePrice) -> str:
    return "*" if row.stale else ""


def _print_device(row: CatalogueRow, out: Console) -> None:
    device = row.device
    peaks = ", ".join(f"{name} {peak / 1e12:,.0f}" for name, peak in device.peak_flops.items())
    link = "" if device.link_bytes_s is None else f", links {device.link_bytes_s / 1e9:,.0f} GB/s"
    watts = "" if device.tdp_w is None else f", {device.tdp_w:,.0f} W"
    print_prose(
        out,
        f"{device.name}: {device.vendor}, {device.memory_bytes / 1e9:.0f} GB at "
        f"{device.bandwidth_bytes_s / 1e12:.2f} TB/s{link}{watts}",
    )
    print_prose(out, f"dense TFLOP/s: {peaks or 'unknown'}")
    print_prose(out, f"source: {device.source}, {device.as_of}", "dim")
    out.print(_parameter_table(row))
    if not row.prices:
        out.print("no price is known; give --price-per-hour to plan with it")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("$/h", justify="right", no_wrap=True)
    for name in ("terms", "as of", "source"):
        table.add_column(name, overflow="fold", no_wrap=name == "as of")
    for price in row.prices:
        listed = price.price
        table.add_row(
            f"{listed.usd_per_hour:.2f}{_mark(price)}", listed.terms, listed.as_of, listed.source
        )
    out.print(table)


def _parameter_table(row: CatalogueRow) -> Table:
    """Fitted numbers with their intervals; an engine's in its own row."""
    dated = row.parameters[0].as_of if row.parameters else ""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = f"fitted numbers of predictions, and their 80 % intervals ({dated})"
    for name in ("number", "engine", "value", "low", "high"):
        table.add_column(name, justify="left" if name in ("number", "engine") else "right")
    for fitted in row.parameters:
        in_us = fitted.name.endswith("_s")
        texts = (rounded(x * 1e6 if in_us else x) for x in (fitted.value, fitted.low, fitted.high))
        label = f"{fitted.name.removesuffix('_s')}, us" if in_us else fitted.name
        table.add_row(label.replace("_", " "), fitted.engine, *texts)
    return table
