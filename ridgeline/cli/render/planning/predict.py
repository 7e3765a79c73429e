"""The table of `ridgeline predict`."""

from __future__ import annotations

from rich.table import Table

from ridgeline.plan.calibration.remote_server import ServerPrediction
from ridgeline.plan.step_time.predict import Prediction
from ridgeline.workflows.planning.predict import OperatingPointResult


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
        table.add_row("decode step", f"{prediction.decode_ms:,.4g} ms", "")
    return table


def _add_times(table: Table, prediction: Prediction | ServerPrediction) -> None:
    for label, name, unit in (
        ("time to first token", "ttft_ms", "ms"),
        ("per output token", "tpot_ms", "ms"),
        ("output", "output_tok_s", "tok/s"),
    ):
        low, high = prediction.interval[name]
        value = getattr(prediction, name)
        table.add_row(label, f"{value:,.4g} {unit}", f"{low:,.4g} .. {high:,.4g}")


def _add_bounds(table: Table, prediction: Prediction) -> None:
    decode_ms = f"{prediction.decode_ms:,.4g} ms"
    table.add_row("decode step", decode_ms, f"bound by {prediction.bound}")
    table.add_row("prefill", "", f"bound by {prediction.prefill_bound}")
    shares = f"{prediction.mbu:.1%}, {prediction.mfu:.1%}"
    table.add_row("MBU, MFU of decode", shares, prediction.compute_dtype)
    table.add_row("KV cache holds", f"{prediction.kv_tokens_max:,} tokens", "")
