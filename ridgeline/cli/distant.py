"""A server's own words beside a run that was measured from outside, and the MFU of its device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from rich.table import Table

from ridgeline.cli.beside import Row, Seen, machine_rows
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.measure.distant import Use, use_of
from ridgeline.measure.report.page import Told
from ridgeline.measure.server.scrape import ServerReport
from ridgeline.measure.steps import Peaks, Work
from ridgeline.records import RunTrace
from ridgeline.spec.cost import cost_model, weight_bytes
from ridgeline.spec.load import load_spec
from ridgeline.spec.model import ModelSpec

HERE = "here"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What the run is held against: the model's arithmetic, the device's peaks, and their name."""

    work: Work
    peaks: Peaks
    name: str


def device_of(model: str, accelerator: str) -> Device:
    """`accelerator`: a row of the catalogue, `4xROW`, or `here`. Raises BadInput."""
    spec = load_spec(model)
    dtype = spec.layers[0].mlp.gate.format.activations
    costs = cost_model(spec)

    def work(shapes: object, num_sampled: int) -> tuple[float, float]:
        step = costs.step(shapes, num_sampled)  # type: ignore[arg-type]
        return step.flops, step.bytes

    if accelerator == HERE:
        return Device(work=work, peaks=_peaks_here(spec, dtype), name=f"this machine, {dtype}")
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", accelerator)
    assert match is not None  # any text that is not empty
    count, row = int(match[1] or 1), find_accelerator(match[2])
    peaks = Peaks(flop_s=count * row.peak(dtype), bytes_s=count * row.bandwidth_bytes_s)
    return Device(work=work, peaks=peaks, name=f"{count} x {row.name}, {dtype}")


def _peaks_here(spec: ModelSpec, dtype: str) -> Peaks:
    from ridgeline.hardware.probe import probe

    machine = probe()
    flop_s, bytes_s = machine.peak_flops(dtype), machine.bandwidth(weight_bytes(spec))
    if flop_s is None or bytes_s is None:
        raise BadInput("this machine was not measured in the model's dtype", value=dtype)
    return Peaks(flop_s=flop_s, bytes_s=bytes_s)


def used(run: RunTrace, report: ServerReport | None, device: Device) -> Use | None:
    """With what the server tells: its steps, and the share of the prompts that its cache gave.

    Its counts begin before the warm-up; the run's share of the steps is taken to be its share of
    the tokens that they made.
    """
    counts = {} if report is None else report.counts
    steps, made = counts.get("num_steps"), counts.get("output_tokens")
    if steps and made:
        steps *= min(1.0, sum(request.output_tokens for request in run.requests) / made)
    return use_of(
        run,
        device.work,
        device.peaks,
        cached_share=(report and _hit_share(report)) or 0.0,
        num_steps=steps,
    )


def _hit_share(report: ServerReport) -> float | None:
    """Of the prompt tokens, by the server's counters, or by its gauge where it has none."""
    if report.counts.get("queried_tokens"):
        return report.counts.get("hit_tokens", 0.0) / report.counts["queried_tokens"]
    return report.means.get("hit_share")


def tables(seen: Seen, use: Use | None, device: Device | None, *, in_process: bool) -> list[Told]:
    """What was told and measured beside a run, each under its title; without those that are empty.

    In process nothing is told: the engine's steps say it better.
    """
    found = [
        Told("the server's own words", () if seen.server is None else tuple(_rows(seen.server))),
        Told("the device", tuple(_use(use, device))),
        Told("the machine under it", tuple(machine_rows(seen.machine, in_process=in_process))),
    ]
    return [each for each in found if each.rows]


def on_console(told: Told) -> Table:
    """Names on the left, figures on the right, remarks behind them."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    found.add_column(told.title)
    found.add_column("", justify="right")
    found.add_column("", style="dim")
    for row in told.rows:
        found.add_row(*row)
    return found


def _use(use: Use | None, device: Device | None) -> Iterator[Row]:
    if use is None or device is None:
        return
    mbu = "no MBU: steps not told" if use.mbu is None else f"MBU {use.mbu:.1%}"
    yield "MFU, MBU", f"{use.mfu:.1%}", f"{mbu}, of {device.name}, over the whole run"


def _rows(report: ServerReport) -> Iterator[Row]:
    means, counts = report.means, report.counts
    yield "server", report.server, f"{report.num_readings} readings of /metrics"
    if "running" in means:
        seats = f" of {means['seats']:.0f} seats" if "seats" in means else ""
        told = f"{seats}, {means.get('waiting', 0):.1f} waiting".removeprefix(", ").strip()
        yield "running", f"{means['running']:.1f}", told
    if "kv_used_share" in means:
        yield "KV occupancy", f"{means['kv_used_share']:.0%}", "mean of the gauge"
    hits = _hit_share(report)
    if hits is not None:
        yield "cache hits", f"{hits:.0%}", "of the prompt tokens looked up"
    if "preemptions" in counts:
        yield "preemptions", f"{counts['preemptions']:.0f}", ""
    if counts.get("num_steps"):
        yield "steps", f"{counts['num_steps']:.0f}", ""
    if "cpu_s" in counts and "rss_bytes" in means:
        held = f"s of its process, which holds {means['rss_bytes'] / 1e6:,.0f} MB"
        yield "CPU", f"{counts['cpu_s']:.1f}", held
    for name, text in (("queue_s", "queue"), ("prefill_s", "prefill"), ("decode_s", "decode")):
        if name in report.mean_s:
            yield text, f"{1000 * report.mean_s[name]:.1f}", "ms per request (mean)"
