"""A model's arithmetic as tables, and the check of its quantised layers as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from ridgeline.modelspec.cost.inspect import InspectRow
from ridgeline.workflows.inspect_model import ModelInspection

if TYPE_CHECKING:
    from ridgeline.modelspec.cost.inspect import LayerGroup
    from ridgeline.modelspec.cost.ranks import RankTable
    from ridgeline.modelspec.what_if import KvComparison, KvKind

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def inspection_tables(inspection: ModelInspection) -> Group:
    """The model as a whole, then its layers."""
    value, _, note = inspection.tokenizer.partition(": ")
    tokenizer = InspectRow("text", "tokenizer", value, note=note)
    defaults = str(inspection.default_sampling)
    text = (tokenizer, InspectRow("text", "sampling defaults", defaults))
    return Group(_summary(inspection.model, (*inspection.rows, *text)), _layers(inspection.layers))


def kv_comparison_lines(comparison: KvComparison) -> Group:
    """The KV cache before and after the edits, by kind of layer."""
    table = Table(
        title=f"{comparison.model}: KV cache of one sequence of {comparison.context:,} tokens",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in ("layers", "B/token", "held", "held per token"):
        table.add_column(name, justify="right", no_wrap=True)
    for heading, kinds in (("before", comparison.before), ("after", comparison.after)):
        for i, kind in enumerate(kinds):
            table.add_row(heading if i == 0 else "", *_kv_cells(kind, comparison.context))
        table.add_row("", "[bold]all", *_all_cells(kinds, comparison.context))
    effects = ", ".join(f"{edit} {times:.1f}" for edit, times in comparison.effects)
    lines = [f"{comparison.times:.1f} times smaller with {comparison.edits}"]
    lines += [f"each alone: {effects}"] if len(comparison.effects) > 1 else []
    if any(not edit.startswith("kv_dtype=") for edit, _ in comparison.effects):
        lines += ["A model has to be trained in this form; the figures are those of its shapes."]
    return Group(table, *lines)


def rank_lines(layout: RankTable) -> Table:
    """What each rank of a layout holds."""
    table = Table(
        title=f"{layout.model}, {layout.layout}", title_justify="left", box=None, pad_edge=False
    )
    for name in ("rank", "layers", "query heads", "KV heads", "experts", "weights", "KV B/token"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in layout.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.layers),
            str(rank.query_heads),
            str(rank.kv_heads),
            str(rank.experts),
            scaled(rank.weight_bytes) + "B",
            f"{rank.kv_bytes_per_token:,.0f}",
        )
    return table


def _kv_cells(kind: KvKind, context: int) -> tuple[str, ...]:
    held = kind.bytes_at_context
    return (
        kind.kind,
        str(kind.num_layers),
        f"{kind.bytes_per_token:,}",
        scaled(held) + "B",
        f"{held / context:,.0f} B",
    )


def _all_cells(kinds: Sequence[KvKind], context: int) -> tuple[str, ...]:
    held = sum(kind.bytes_at_context for kind in kinds)
    return (
        str(sum(kind.num_layers for kind in kinds)),
        f"{sum(kind.bytes_per_token for kind in kinds):,}",
        scaled(held) + "B",
        f"{held / context:,.0f} B",
    )


def check_lines(inspection: ModelInspection) -> Iterator[str]:
    """What was not read, and the result of the self-check if there was one."""
    if inspection.note:
        yield inspection.note
    checks = inspection.self_check
    if not checks:
        return
    faults = [f"  layer {check.layer}: {fault}" for check in checks for fault in check.faults]
    count = sum(check.num_weights for check in checks)
    yield f"self-check: {count} weights in {len(checks)} layers, " + (
        f"{len(faults)} faults" if faults else "scales finite, integers and zero-points in range"
    )
    yield from faults
    errors = ", ".join(f"{check.error:.3f}" for check in checks if check.error is not None)
    if errors:
        yield f"  relative error of the weights, largest of each layer: {errors}"


def _summary(model: str, rows: Sequence[InspectRow]) -> Table:
    table = Table(title=model, title_justify="left", show_header=False, box=None, pad_edge=False)
    for style in ("dim", "", "bold", "dim"):
        table.add_column(style=style)
    table.columns[2].justify = "right"
    section = ""
    for row in rows:
        heading = row.section if row.section != section else ""
        table.add_row(heading, row.name, amount(row), row.note)
        section = row.section
    return table


def _layers(groups: Sequence[LayerGroup]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", no_wrap=True)
    for name in ("params", "weights", "FLOP/token", "KV B/token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kind")
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
    """A decimal prefix and two decimals: `1.23 G`."""
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.2f} {prefix}"
    return f"{value:.0f} "
