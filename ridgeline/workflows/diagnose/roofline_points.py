"""The phases of a measured run under a device's roofline, whatever server it was measured on.

A Ridgeline engine records its steps. Those of another server are inferred from the times at which
clients saw tokens (`ridgeline.diagnose.losses.observed_steps`) and what the server reports about
prompts: when each started, or how long one took on average. If tokens arrive several at a time
(speculation, coalesced chunks), there is one point for the whole run, provided that the server
counts its steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ridgeline.diagnose import roofline_points
from ridgeline.diagnose.losses.gpu_losses import in_flight_share
from ridgeline.diagnose.losses.observed_steps import (
    PrefillStart,
    infer_steps_from_tokens,
    one_token_requests,
)
from ridgeline.diagnose.roofline.text_chart import WHOLE_RUN
from ridgeline.measure.results.event_log import RunContext
from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.roofline import Peaks, PriceStep, RooflinePoint
from ridgeline.workflows.load.server_utilisation import (
    hit_share,
    server_utilisation,
    steps_of_run,
)
from ridgeline.workflows.targets import ModelOnDevice

MIN_ONE_BY_ONE = 0.9  # share of requests whose tokens must arrive one by one


class RunRoofline(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of a run under `peaks`.

    `note` says where the steps come from, or why there are no points.
    """

    points: tuple[RooflinePoint, ...]
    peaks: Peaks
    note: str = ""


def run_roofline(
    run: RunTrace, context: RunContext, metrics: Mapping[str, float], device: ModelOnDevice
) -> RunRoofline:
    """Roofline of a run. `metrics`: what the server reported, by name (`server_metrics`)."""
    if run.steps:
        points = phase_points(run.steps, device.price, device.peaks)
        return RunRoofline(
            points=points, peaks=device.peaks, note="steps: the engine's own records"
        )
    served = [request for request in run.requests if request.token_s]
    if len(one_token_requests(run)) < MIN_ONE_BY_ONE * max(1, len(served)):
        return _whole_run(run, context, device)
    report = context.server
    steps = infer_steps_from_tokens(
        run, cached_share=(report and hit_share(report)) or 0.0, began=prefill_start(metrics)
    )
    counted = steps_of_run(run, report)
    count = f"; the server counted {counted:,.0f}" if counted else ""
    return RunRoofline(
        points=phase_points(steps, device.price, device.peaks),
        peaks=device.peaks,
        note=f"steps: {len(steps):,} as clients saw them{count}. Their times run from token to "
        "token and include host and network",
    )


def phase_points(
    steps: tuple[StepStat, ...], price: PriceStep, peaks: Peaks
) -> tuple[RooflinePoint, ...]:
    """One point per phase that occurred, named after its phase."""
    points = roofline_points("", steps, price, peaks)
    return tuple(msgspec.structs.replace(point, name=point.phase) for point in points)


def prefill_start(metrics: Mapping[str, float]) -> PrefillStart:
    """When the prefill of a request started, or None if that is unknown.

    As the server says of the request itself; else by its mean prefill time; else when the request
    was sent, if none ever waited.
    """
    prefill_s, waiting = metrics.get("prefill_s"), metrics.get("waiting_p95")

    def start_s(request: RequestTrace) -> float | None:
        if request.started_s is not None:
            return request.started_s
        if prefill_s is not None:
            return request.token_s[0] - prefill_s
        return request.sent_s if waiting == 0 else None

    return start_s


def _whole_run(run: RunTrace, context: RunContext, device: ModelOnDevice) -> RunRoofline:
    """One point for all steps, from the tokens and the server's count of its steps."""
    use = server_utilisation(run, context.server, device)
    why = "tokens arrived several at a time, so that steps cannot be inferred from outside"
    if use is None or use.nbytes is None:
        note = f"{why}, and the server does not count them: no phase can be placed"
        return RunRoofline(points=(), peaks=device.peaks, note=note)
    time_s, intensity = in_flight_share(run) * run.duration_s, use.flops / use.nbytes
    point = RooflinePoint(
        name=WHOLE_RUN,
        phase="mixed",
        intensity=intensity,
        achieved_flops_s=use.flops / time_s,
        achieved_bytes_s=use.nbytes / time_s,
        roof_flops_s=device.peaks.attainable_flops_s(intensity),
        time_s=time_s,
        num_steps=use.num_steps or 0,
    )
    note = f"{why}: the whole run, by the {use.num_steps:,} steps that the server counted"
    return RunRoofline(points=(point,), peaks=device.peaks, note=note)
