"""The console report of `ridgeline plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ridgeline.cli.render.console import print_prose
from ridgeline.modelspec.cost.serving_formats import SHORT_DTYPES
from ridgeline.plan.fleet.pareto_plot import draw_front
from ridgeline.plan.fleet.search import Candidate
from ridgeline.records import Slo
from ridgeline.report.numbers import rounded
from ridgeline.workflows.planning.plan import PlanResult


def print_plan(plan: PlanResult, out: Console) -> None:
    """The fleets, the memory, the chart of the front, the commands and the notes."""
    demand, slo = plan.demand, Slo.parse(plan.slo)
    if plan.bill is not None:
        print_prose(out, plan.bill.sentence)
    print_prose(out, f"On it {plan.requests.sentence}.")
    print_prose(
        out,
        f"{plan.model}: {demand.rate:g} requests/s of {demand.isl} in (95 %: {demand.isl_p95}), "
        f"{demand.osl} out, under {slo}; {plan.num_candidates:,} candidates",
    )
    out.print(fleet_table(plan.fleets, slo.attainment))
    if plan.fleets:
        best = plan.fleets[0]
        print_prose(
            out,
            f"The first holds for --max-num-seqs {best.max_num_seqs} --max-num-batched-tokens "
            f"{best.max_num_batched_tokens}: give `ridgeline simulate` the same, and --num-prompts "
            "10000, for the same load.",
        )
    out.print(_memory_table(plan))
    split = plan.disaggregation
    print_prose(
        out, f"disaggregate prefill and decode: {'yes' if split.yes else 'no'}: {split.why}"
    )
    chart = draw_front(plan.front, slo.tpot_s)
    if chart:
        out.print()
        out.print(chart, markup=False)
    out.print()
    for name, text in plan.commands.items():
        lines = text.replace("\n", "\n  ")
        out.print(f"{name}:\n  {lines}", markup=False, soft_wrap=True)
    out.print()
    for note in plan.notes:
        print_prose(out, f"- {note}", "dim")


def fleet_table(fleets: Sequence[Candidate], attainment: float) -> Table:
    """One row per kind of replica, cheapest first: ms, dollars per hour and per 1M tokens."""
    caption = (
        f"TTFT, TPOT: p{100 * attainment:g} over requests at this load, ms, with 80 % intervals; "
        "seqs: in flight at full load; dollars per hour, per 1M tokens in and out"
    )
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"
    )
    table.add_column("fleet", overflow="fold")
    table.add_column("weights/KV", no_wrap=True)
    for name in ("seqs", "TTFT", "80 %", "TPOT", "80 %", "$/h", "$in", "$out", "kW"):
        table.add_column(name, justify="right", no_wrap=True)
    for fleet in fleets:
        table.add_row(
            f"{fleet.num_replicas} x {fleet.device} {fleet.layout}",
            f"{_short_dtype(fleet.weight_dtype)}/{_short_dtype(fleet.kv_dtype)}",
            str(fleet.batch),
            f"{fleet.ttft_s * 1000:.0f}",
            _interval_ms(fleet.ttft_interval_s),
            rounded(fleet.tpot_s * 1000),
            _interval_ms(fleet.tpot_interval_s),
            _dollars(fleet.dollars_per_hour),
            _dollars(fleet.input_dollars_per_mtok),
            _dollars(fleet.output_dollars_per_mtok),
            "" if fleet.watts is None else f"{fleet.watts / 1000:.1f}",
        )
    return table


def _memory_table(plan: PlanResult) -> Table:
    best, memory = plan.fleets[0], plan.memory
    title = f"memory of one {best.device}, {best.layout}, {best.weight_dtype}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.min_width = len(title)
    for name, nbytes in memory.rows():
        table.add_row(name, f"{nbytes / 1e9:.2f} GB")
    copies = "" if memory.kv_copies == 1 else f", each number held {memory.kv_copies:g} times"
    table.add_row("KV per token", f"{memory.kv_bytes_per_token:,.0f} B{copies}")
    table.add_row("KV of the replica", f"{memory.kv_tokens:,} tokens")
    return table


def _interval_ms(interval_s: tuple[float, float]) -> str:
    low, high = interval_s
    return f"{low * 1000:.0f}-{high * 1000:.0f}"


def _short_dtype(dtype: str) -> str:
    return SHORT_DTYPES.get(dtype, dtype)


def _dollars(value: float | None) -> str:
    return "" if value is None else rounded(value, 2) if value < 1 else rounded(value)


def print_manifests(result: PlanResult, paths: Iterable[Path], console: Console) -> None:
    """The manifests that were written, and why others were not."""
    for path in paths:
        print_prose(console, f"written: {path}", "dim")
    left_out = {} if result.manifests is None else result.manifests.left_out
    for name, why in left_out.items():
        print_prose(console, f"not written: {name}: {why}", "yellow")
