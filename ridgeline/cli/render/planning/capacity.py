"""The table of `ridgeline capacity`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ridgeline.cli.render.console import print_prose
from ridgeline.modelspec.cost.serving_formats import SHORT_DTYPES
from ridgeline.workflows.planning.capacity import CapacityResult, DeviceCapacity


def print_capacity(result: CapacityResult, out: Console, *, named: bool) -> None:
    """The smallest and the cheapest device, a line per device, and those that are too small.

    `named`: the user named the devices, so each refusal is explained.
    """
    if result.rows:
        print_prose(out, f"{result.model}: {_headline(result)}")
        out.print(_table(result))
    else:
        out.print(f"no device holds {result.model}", markup=False)
    if named or not result.rows:
        for name, why in result.too_small.items():
            print_prose(out, f"- {name}: {why}", "dim")
    elif result.too_small:
        listed = ", ".join(result.too_small)
        print_prose(out, f"- too small, or lacking the format: {listed}", "dim")


def _headline(result: CapacityResult) -> str:
    smallest, cheapest = result.rows[0], result.cheapest
    text = f"the smallest that holds it is {_devices(smallest)}"
    if cheapest is None:
        return text
    price = f"${cheapest.dollars_per_hour:,.2f} an hour"
    if cheapest.device == smallest.device:
        return f"{text}, which is also the cheapest at {price}"
    return f"{text}; the cheapest is {_devices(cheapest)} at {price}"


def _devices(row: DeviceCapacity) -> str:
    return f"{row.num_devices} x {row.device}"


def _table(result: CapacityResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = "GB of weights and of KV cache; sequences of each length in tokens at once"
    table.add_column("devices", no_wrap=True)
    table.add_column("format", no_wrap=True)
    for name in ("GB", "KV", *map(_short_length, result.contexts), "longest", "$/h"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        formats = (SHORT_DTYPES.get(name, name) for name in (row.weight_dtype, row.kv_dtype))
        table.add_row(
            _devices(row),
            "/".join(formats),
            f"{row.weight_bytes / 1e9:.1f}",
            f"{row.kv_bytes / 1e9:.1f}",
            *(f"{row.num_seqs[context]:,}" for context in result.contexts),
            f"{row.longest:,}",
            "" if row.dollars_per_hour is None else f"{row.dollars_per_hour:.2f}",
        )
    return table


def _short_length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"
