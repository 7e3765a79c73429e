"""A server's own words beside a run that was measured from outside, and the MFU of its device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from rich.table import Table

from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.measure.distant import Use, use_of
from ridgeline.measure.report.page import Told
from ridgeline.measure.server.config import ELSEWHERE
from ridgeline.measure.server.scrape import ServerReport
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import cost_model, weight_bytes
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import (
    apply_lm_head,
    apply_quantization,
    with_activations,
    with_dtype,
    with_kv_dtype,
)
from ridgeline.records import EngineInfo, RunTrace
from ridgeline.roofline import Peaks, PriceStep
from ridgeline.workflows.load.server_monitor import Row, Seen, machine_rows

HERE = "here"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is compared with: the work of a step, and the peaks and name of the device."""

    price: PriceStep
    peaks: Peaks
    name: str


def device_of(model: str, accelerator: str, info: EngineInfo | None = None) -> Device:
    """`accelerator`: a row of the catalogue, `4xROW`, or `here`. `info`: how a server of ours says
    that it computes. Raises BadInput.
    """
    spec = _as_served(load_spec(model), info)
    dtype = spec.layers[0].mlp.gate.format.activations
    if accelerator == HERE:
        name, peaks = f"this machine, {dtype}", _peaks_here(spec, dtype)
    else:
        name, peaks = _peaks_of_row(accelerator, dtype)
    return Device(price=cost_model(spec).step, peaks=peaks, name=name)


def _peaks_of_row(accelerator: str, dtype: str) -> tuple[str, Peaks]:
    """So many devices of one kind, as their vendor states them."""
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", accelerator)
    assert match is not None  # any text that is not empty
    count, row = int(match[1] or 1), find_accelerator(match[2])
    peaks = Peaks(
        flops_s=count * row.peak(dtype),
        bytes_s=count * row.bandwidth_bytes_s,
        dtype=dtype,
        source=f"the data sheet of {row.name} (dense), which no program reaches",
    )
    return f"{count} x {row.name}, {dtype}", peaks


def _peaks_here(spec: ModelSpec, dtype: str) -> Peaks:
    from ridgeline.hardware.probe import probe

    machine = probe()
    flops_s, bytes_s = machine.peak_flops(dtype), machine.bandwidth(weight_bytes(spec))
    if flops_s is None or bytes_s is None:
        raise BadInput("this machine was not measured in the model's dtype", value=dtype)
    return Peaks(
        flops_s=flops_s,
        bytes_s=bytes_s,
        dtype=dtype,
        source="the probe of this machine" + (", disturbed: too low" if machine.disturbed else ""),
    )


def _as_served(spec: ModelSpec, info: EngineInfo | None) -> ModelSpec:
    """With what a server of ours says that it does to the weights and the KV cache."""
    if info is None or info.device == ELSEWHERE or not info.compute_dtype:
        return spec
    told = info.settings
    spec = with_dtype(spec, info.compute_dtype)
    if isinstance(told.get("quantization"), str):
        spec = apply_quantization(spec, str(told["quantization"]))
    if isinstance(told.get("lm_head_quantization"), str):
        spec = apply_lm_head(spec, str(told["lm_head_quantization"]))
    if told.get("activations") not in (None, "int8"):
        spec = with_activations(spec, str(told["activations"]))
    if told.get("kv_cache_dtype") not in (None, "auto"):
        spec = with_kv_dtype(spec, str(told["kv_cache_dtype"]))
    return spec


def used(run: RunTrace, report: ServerReport | None, device: Device) -> Use | None:
    """With what the server tells: its steps, and the share of the prompts that its cache gave."""
    return use_of(
        run,
        device.price,
        device.peaks,
        cached_share=(report and hit_share(report)) or 0.0,
        num_steps=steps_told(run, report),
    )


def steps_told(run: RunTrace, report: ServerReport | None) -> float | None:
    """The run's share of the steps that the server counted, by the tokens that they made: others
    may have asked it too.
    """
    counts = {} if report is None else report.counts
    steps, made = counts.get("num_steps"), counts.get("output_tokens")
    if steps and made:
        steps *= min(1.0, sum(request.output_tokens for request in run.requests) / made)
    return steps


def hit_share(report: ServerReport) -> float | None:
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
    hits = hit_share(report)
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
