"""The tables of `ridgeline predict`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ridgeline.plan.calibration.remote_server import ServerPrediction
from ridgeline.plan.step_time.predict import Prediction
from ridgeline.plan.step_time.quantization_cost import QuantizationCost
from ridgeline.plan.step_time.waterfall import TimeTerm, Waterfall
from ridgeline.report.numbers import rounded
from ridgeline.workflows.planning.predict import OperatingPointResult

BAR_WIDTH = 22  # characters, so that a row with the longest names takes 79


def prediction_table(result: OperatingPointResult) -> Table:
    """Predicted times with their 80 % intervals, and what bounds them."""
    point, prediction, server = result.point, result.prediction, result.server
    where = f"{point.model} on {point.device}, "
    if server is not None:
        where = f"{server.model} at {server.server}, calibrated {server.as_of}: "
    table = Table(
        title=f"{where}{point.batch} x {point.isl} in, {point.osl} out",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name, style in (("", "dim"), ("predicted", "bold"), ("80 % interval", "")):
        table.add_column(name, style=style, justify="left" if not name else "right")
    _add_times(table, prediction)
    if isinstance(prediction, Prediction):
        _add_bounds(table, prediction)
    else:
        table.add_row("decode step", f"{rounded(prediction.decode_ms, 4)} ms", "")
    return table


def _add_times(table: Table, prediction: Prediction | ServerPrediction) -> None:
    for label, name, unit in (
        ("time to first token", "ttft_ms", "ms"),
        ("per output token", "tpot_ms", "ms"),
        ("output", "output_tok_s", "tok/s"),
    ):
        low, high = prediction.interval[name]
        value = getattr(prediction, name)
        table.add_row(
            label,
            f"{rounded(value, 4)} {unit}",
            f"{rounded(low, 4)} .. {rounded(high, 4)}",
        )


def _add_bounds(table: Table, prediction: Prediction) -> None:
    decode_ms = f"{rounded(prediction.decode_ms, 4)} ms"
    table.add_row("decode step", decode_ms, f"bound by {prediction.bound}")
    table.add_row("prefill", "", f"bound by {prediction.prefill_bound}")
    shares = f"{prediction.mbu:.1%}, {prediction.mfu:.1%}"
    table.add_row("MBU, MFU of decode", shares, prediction.compute_dtype)
    loads = prediction.tiers
    if loads is not None:
        took_ms = 1000 * (loads.copy_s + loads.wait_s)
        detail = (
            f"in {rounded(took_ms, 4)} ms; computing them: {rounded(1000 * loads.compute_s, 4)} ms"
        )
        if not loads.tokens:
            detail = f"{loads.declined_tokens:,} are quicker to compute"
        table.add_row("loaded from tiers", f"{loads.tokens:,} tokens", detail)
    table.add_row("KV cache holds", f"{prediction.kv_tokens_max:,} tokens", _sequences(prediction))
    making = prediction.making
    if making is not None:
        table.add_row(
            f"{making.method}, once", f"at least {rounded(making.least_s)} s", _pays(making)
        )


def _pays(making: QuantizationCost) -> str:
    """What quantising reads and takes, and from which request on it has paid."""
    read = f"{making.tokens:,} tokens {making.passes} x, " if making.tokens else ""
    memory = f"{read}{making.memory_bytes / 1e9:,.2f} GB"
    if making.pays_after is None:
        return f"{memory}; saves no time"
    return f"{memory}; pays after {making.pays_after:,} requests"


def _sequences(prediction: Prediction) -> str:
    """How many sequences of this load that is: with windows, more than their tokens suggest."""
    if not prediction.kv_tokens_each:
        return ""
    held = int(prediction.kv_tokens_max / prediction.kv_tokens_each)
    return f"{held:,} of these requests, {prediction.kv_tokens_each:,.0f} each"


def print_waterfall(terms: Waterfall, out: Console) -> None:
    """The terms of TPOT and of TTFT as bars, each beginning where the one before it ends."""
    for title, rows in (("per output token", terms.tpot), ("time to first token", terms.ttft)):
        out.print()
        out.print(_waterfall_table(title, rows))


def _waterfall_table(title: str, terms: tuple[TimeTerm, ...]) -> Table:
    total = sum(term.ms for term in terms)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("term", no_wrap=True)
    for name in ("ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True, style="dim")
    table.add_column("", no_wrap=True)
    edges = [0.0]
    for term in terms:
        edges.append(edges[-1] + term.ms)
    longest = max(edges)
    for term, start in zip(terms, edges, strict=False):
        bar = _bar(start / longest, (start + term.ms) / longest)
        table.add_row(term.name, f"{term.ms:,.3f}", f"{term.ms / total:.0%}", term.bound, bar)
    table.add_row("sum", f"{total:,.3f}", "100%", "", _bar(0.0, total / longest), style="bold")
    return table


def _bar(start: float, end: float) -> str:
    """A bar between two shares of the width; terms that take time away are hatched."""
    low, high = sorted((round(start * BAR_WIDTH), round(end * BAR_WIDTH)))
    return " " * low + ("░" if end < start else "█") * max(1, high - low)
