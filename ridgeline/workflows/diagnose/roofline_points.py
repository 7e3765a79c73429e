"""Where a measured run's prefill and decode stand under a device's roofline, whoever served it.

An engine of ours keeps its steps. Of somebody else's they follow from the instants at which clients
saw tokens (diagnose/seen_steps.py), with what the server says of its prompts: when it began with
each, or how long one took on average. Where tokens come several at a time (speculation, coalesced
chunks) there is one point for the whole run, if the server counts its steps, and none if not.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ridgeline.diagnose import RooflinePoint, roofline_points
from ridgeline.diagnose.chart import WHOLE_RUN
from ridgeline.diagnose.from_gpu import in_flight_share
from ridgeline.diagnose.seen_steps import Began, one_by_one, seen_steps
from ridgeline.measure.log import Beside
from ridgeline.records import RequestTrace, RunTrace, StepStat
from ridgeline.roofline import Peaks, PriceStep
from ridgeline.workflows.load.server_utilisation import Device, hit_share, steps_told, used

ENOUGH = 0.9  # of the served requests, whose tokens must have come one by one


class RunRoofline(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of a run under `peaks`; `note` says where their steps are from, or why there
    are no points.
    """

    points: tuple[RooflinePoint, ...]
    peaks: Peaks
    note: str = ""


def placed(
    steps: tuple[StepStat, ...], price: PriceStep, peaks: Peaks
) -> tuple[RooflinePoint, ...]:
    """One point per phase that occurred, each under its own name."""
    found = roofline_points("", steps, price, peaks)
    return tuple(msgspec.structs.replace(each, name=each.phase) for each in found)


def roof_of(
    run: RunTrace, beside: Beside, words: Mapping[str, float], device: Device
) -> RunRoofline:
    """`words`: what the server told, as `cli.diagnose.told` gives it."""
    if run.steps:
        points = placed(run.steps, device.price, device.peaks)
        return RunRoofline(
            points=points, peaks=device.peaks, note="steps: the engine's own records"
        )
    served = [request for request in run.requests if request.token_s]
    if len(one_by_one(run)) < ENOUGH * max(1, len(served)):
        return _whole(run, beside, device)
    report = beside.server
    steps = seen_steps(
        run, cached_share=(report and hit_share(report)) or 0.0, began=began_from(words)
    )
    counted = steps_told(run, report)
    told = f"; the server counted {counted:,.0f}" if counted else ""
    return RunRoofline(
        points=placed(steps, device.price, device.peaks),
        peaks=device.peaks,
        note=f"steps: {len(steps):,} as clients saw them{told}. Their time runs from token to "
        "token: host and network are in it",
    )


def began_from(words: Mapping[str, float]) -> Began:
    """When a prompt's computing began: as the server says of the request itself, or by its mean
    time for a prompt; at its send where nobody ever waited.
    """
    prefill_s, waiting = words.get("prefill_s"), words.get("waiting_p95")

    def began(request: RequestTrace) -> float | None:
        if request.started_s is not None:
            return request.started_s
        if prefill_s is not None:
            return request.token_s[0] - prefill_s
        return request.sent_s if waiting == 0 else None

    return began


def _whole(run: RunTrace, beside: Beside, device: Device) -> RunRoofline:
    """One point, from the tokens and the server's count of its steps."""
    use = used(run, beside.server, device)
    why = "tokens came several at a time, so that steps cannot be told from outside"
    if use is None or use.nbytes is None:
        why += "; nor does the server count them: no phase can be placed"
        return RunRoofline(points=(), peaks=device.peaks, note=why)
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
