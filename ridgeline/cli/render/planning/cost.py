"""The console report of `ridgeline cost`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ridgeline.cli.render.console import print_prose
from ridgeline.report.numbers import rounded
from ridgeline.workflows.planning.cost import CostResult


def print_cost(result: CostResult, out: Console) -> None:
    """The fleet's cost, the ways to pay for it, and the providers' prices."""
    fleet, usage = result.fleet, result.usage
    out.print(
        f"{usage.rate:g} requests/s of {usage.isl} in ({usage.prefix} shared, "
        f"{usage.hit_rate:.0%} hit), {usage.osl} out{', as a batch' if usage.batch else ''}"
    )
    print_prose(
        out,
        f"own: {fleet.num_replicas} x {fleet.device} {fleet.layout} {fleet.weight_dtype}: "
        f"${result.dollars_per_hour:,.2f} an hour, ${result.dollars_per_month:,.0f} a month, "
        f"${rounded(1000 * result.dollars_per_request)} per 1,000 requests ({result.basis})",
    )
    print_prose(out, result.requests.sentence)
    if len(result.terms) > 1:
        out.print(_terms_table(result))
        out.print()
    out.print(_offers_table(result))
    for note in (*result.notes, "models differ in quality: compare their answers, too"):
        print_prose(out, f"- {note}", "dim")


def _terms_table(result: CostResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("the same fleet, paid for as", overflow="fold")
    for name in ("$/device/h", "$ a month", "$ per 1,000", "as of"):
        table.add_column(name, justify="right", no_wrap=True)
    for terms in result.terms:
        table.add_row(
            terms.name,
            rounded(terms.per_device_hour),
            f"{terms.per_month:,.0f}",
            rounded(1000 * terms.per_request),
            terms.as_of,
        )
    return table


def _offers_table(result: CostResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("$ per 1,000 requests", overflow="fold")
    for name in ("all", "input", "cache", "output", "a month", "own from", "as of"):
        table.add_column(name, justify="right", no_wrap=True)
    for offer in result.offers:
        request, even = offer.per_request, offer.break_even
        cache = request.cached_read + request.cache_write + request.storage
        parts = (request.total, request.input, cache, request.output)
        table.add_row(
            offer.name,
            *(rounded(1000 * part) for part in parts),
            f"{offer.per_month:,.0f}",
            "never" if even.rate is None else f"{rounded(even.rate)}/s",
            offer.as_of,
        )
    return table
