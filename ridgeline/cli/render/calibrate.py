"""The tables of `ridgeline calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ridgeline.plan.calibration.calibration import Calibration
from ridgeline.plan.calibration.interference import InterferenceTrace
from ridgeline.plan.calibration.remote_server import ServerTimes
from ridgeline.report.numbers import rounded
from ridgeline.workflows.calibrate.calibration_result import CalibrationResult


def calibration_table(result: CalibrationResult, output: Path) -> Table:
    """What was fitted, and how well."""
    if result.machine is not None:
        return _machine_table(result.machine, output)
    assert result.server is not None
    return _server_table(result.server, output)


def _machine_table(calibration: Calibration, output: Path) -> Table:
    kinds = f"{len(calibration.residuals)} kinds of steps in {calibration.took_s:.0f} s"
    table = _table(f"{calibration.device}, {calibration.as_of}: {kinds}")
    table.add_row("memory reads", f"{calibration.memory_bandwidth / 1e9:.1f} GB/s", "")
    for name, linear in calibration.linears.items():
        rows = min(64, linear.rows[-1])
        rate = 2 * rows / linear.seconds_per_weight(rows) / 1e9
        share = f"{linear.bandwidth:.0%} of the read bandwidth"
        per_layer = f"{1e6 * linear.layer_s:.0f} us a layer"
        table.add_row(name, f"{rate:.0f} GFLOP/s at {rows} rows", f"{share}; {per_layer}")
    attention = calibration.attention
    table.add_row(
        "attention",
        f"{1e-9 / max(attention.prompt_flop_s, 1e-18):.0f} GFLOP/s in prompts",
        f"{1e-9 / max(attention.decode_byte_s, 1e-18):.0f} GB/s and "
        f"{1e-9 / max(attention.decode_flop_s, 1e-18):.0f} GFLOP/s in decodes",
    )
    overheads = calibration.overheads
    table.add_row(
        "overhead",
        f"{1e6 * overheads.step_s:.0f} us a step",
        f"{1e6 * overheads.run_s:.1f} us a sequence; {1e3 * overheads.first_s:.2f} ms a request",
    )
    table.add_row(
        "streaming",
        f"{1e6 * overheads.reader_s:.0f} us a token",
        f"{1e3 * overheads.reader_first_s:.2f} ms a request (simulate includes both)",
    )
    if calibration.interference is not None:
        table.add_row("interference", *_interference(calibration.interference))
    tpot = f"TPOT {calibration.tpot_error:.0%} to expect"
    table.add_row("median error", tpot, f"TTFT {calibration.ttft_error:.0%}")
    table.add_row("written to", str(output), "use it with --calibration")
    return table


def _server_table(server: ServerTimes, output: Path) -> Table:
    table = _table(f"{server.model} at {server.server}, {server.as_of}: {server.took_s:.0f} s")
    table.add_row(
        "first token",
        f"{rounded(1e3 * server.base_s)} ms + {rounded(1e6 * server.by_token_s)} us a token",
        f"+ {rounded(1e9 * server.by_pair_s)} ns a token squared" if server.by_pair_s else "",
    )
    for batch, seconds in zip(server.batches, server.curve_s, strict=True):
        table.add_row(f"{batch} at once", f"{rounded(1e3 * seconds)} ms a token", "")
    if server.by_context_s:
        per_token = f"{rounded(1e9 * server.by_context_s)} ns per token of context and step"
        table.add_row("context", per_token, "")
    for name, why in server.unknown.items():
        table.add_row("not known", name, why)
    errors = f"TTFT {server.ttft_error:.0%}, TPOT {server.tpot_error:.0%}"
    table.add_row("median error", f"{errors} (each batch from the others)", "")
    table.add_row("written to", str(output), "use it with predict --calibration")
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for _ in range(3):
        table.add_column("", justify="left")
    return table


def _interference(trace: InterferenceTrace) -> tuple[str, str]:
    """Steps under load over the fit: median and middle 80 %; the slowest and fastest pass."""

    def spread(values: Sequence[float]) -> str:
        low, middle, high = (sorted(values)[int(q * len(values))] for q in (0.1, 0.5, 0.9))
        return f"{middle:.2f} ({low:.2f} .. {high:.2f})"

    passes = (
        f"; passes {min(trace.pass_ratios):.2f} .. {max(trace.pass_ratios):.2f}"
        if trace.pass_ratios
        else ""
    )
    decode, prompt = spread(trace.decode), spread(trace.prompt)
    return (
        f"{trace.span_s:.0f} s under load",
        f"decodes {decode}, prompts {prompt} of the fit{passes}",
    )
