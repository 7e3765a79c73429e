"""`ridgeline inspect MODEL`: the model's arithmetic as a table, or as JSON; of a quantised
checkpoint also whether its layers are whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group
from rich.table import Table

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.tools import InspectOptions
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.load import load_spec, read_json
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.checkpoints.packed_config import KEY
from ridgeline.modelspec.cost.inspect import InspectRow, LayerGroup, inspect_table, layer_groups
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears
from ridgeline.report.json_line import json_line

if TYPE_CHECKING:
    from ridgeline.engine.checkpoints.self_check import LayerCheck

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def inspect(call: Invocation) -> int:
    """`ridgeline inspect`."""
    options = call.read(InspectOptions)
    for name in filter(None, (options.model, options.against)):
        fetch_model(name)
    return command(options.model, options.json, against=options.against)


def command(
    model: str, json: bool = False, console: Console | None = None, against: str | None = None
) -> int:
    """Print the arithmetic of `model`; the exit code, 1 where a layer is faulty. Raises BadModel.

    `against`: the original of a quantised model, whose weights its own are compared with.
    """
    spec = load_spec(model)
    checks = _checked(model, spec, against)
    if json:
        told = as_json(spec) | {"self_check": msgspec.to_builtins(checks)}
        print(json_line(told))
    else:
        out = console or Console()
        out.print(render(spec))
        for line in _check_lines(checks):
            out.print(line, highlight=False)
    return 1 if any(check.faults for check in checks) else 0


def is_quantised(model: str) -> bool:
    """Does the checkpoint say so?"""
    return is_gguf(model) or KEY in read_json(model_path(model) / "config.json")


def _checked(model: str, spec: ModelSpec, against: str | None) -> list[LayerCheck]:
    quantised = [p for p, linear in linears(spec).items() if linear.format.kind != "dense"]
    told = not is_dummy(model) and (quantised or is_quantised(model))
    if not told:
        if against is not None:
            raise BadInput("only a quantised model has an original", value=model)
        return []
    from ridgeline.engine.checkpoints.self_check import check_layers

    return list(check_layers(model, against))


def _check_lines(checks: Sequence[LayerCheck]) -> Iterator[str]:
    if not checks:
        return
    faults = [f"  layer {each.layer}: {fault}" for each in checks for fault in each.faults]
    count = sum(each.num_weights for each in checks)
    yield f"self-check: {count} weights in {len(checks)} layers, " + (
        f"{len(faults)} faults" if faults else "scales finite, numbers and zero-points in range"
    )
    yield from faults
    errors = [each.error for each in checks if each.error is not None]
    if errors:
        told = ", ".join(f"{error:.3f}" for error in errors)
        yield f"  distance from the original, largest of each layer: {told}"


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


def amount(row: InspectRow) -> str:
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
