"""`ridgeline inspect MODEL`: the model's arithmetic as a table, or as JSON."""

from __future__ import annotations

import json as json_lib

import msgspec
from rich.console import Console, Group
from rich.table import Table

from ridgeline.spec.inspect import LayerGroup, Row, inspect_table, layer_groups
from ridgeline.spec.load import load_spec
from ridgeline.spec.model import ModelSpec

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def command(model: str, json: bool = False, console: Console | None = None) -> int:
    """Print the arithmetic of `model`; the exit code. Raises BadModel."""
    spec = load_spec(model)
    if json:
        print(json_lib.dumps(as_json(spec)))
    else:
        (console or Console()).print(render(spec))
    return 0


def as_json(spec: ModelSpec) -> dict[str, object]:
    """Everything that the table shows, exact."""
    return {
        "model": spec.name,
        "rows": msgspec.to_builtins(inspect_table(spec)),
        "layers": msgspec.to_builtins(layer_groups(spec)),
    }


def render(spec: ModelSpec) -> Group:
    """The table for a terminal."""
    return Group(_summary(spec), _layers(layer_groups(spec)))


def _summary(spec: ModelSpec) -> Table:
    table = Table(
        title=spec.name, title_justify="left", show_header=False, box=None, pad_edge=False
    )
    for style in ("dim", "", "bold", "dim"):
        table.add_column(style=style)
    table.columns[2].justify = "right"
    section = ""
    for row in inspect_table(spec):
        table.add_row(
            row.section if row.section != section else "", row.name, amount(row), row.note
        )
        section = row.section
    return table


def _layers(groups: list[LayerGroup]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", no_wrap=True)
    for name in ("params", "weights", "FLOP/token", "KV B/token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("each is")
    for group in groups:
        table.add_row(
            str(group.num_layers),
            scaled(group.params),
            scaled(group.weight_bytes) + "B",
            scaled(group.linear_flops_per_token),
            f"{group.kv_bytes_per_token:,}",
            f"{group.attention}; {group.mlp} (layers {group.numbers})",
        )
    return table


def amount(row: Row) -> str:
    """The value with its unit, scaled to three or four digits."""
    if isinstance(row.value, str):
        return row.value
    if row.unit in ("", "tokens"):
        return f"{row.value:,} {row.unit}".strip()
    if row.unit == "params":
        return f"{row.value / 1e9:.2f} B" if row.value >= 1e9 else f"{row.value / 1e6:.2f} M"
    if row.unit == "B" and row.value < 1e6:
        return f"{row.value:,.0f} B"
    return f"{scaled(row.value)}{row.unit}" if row.unit != "FLOP/B" else f"{row.value:,.1f} FLOP/B"


def scaled(value: float) -> str:
    """1.23 G: decimal prefixes, three digits after the point at most."""
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.2f} {prefix}"
    return f"{value:.0f} "
