"""MFU, MBU and cache hits of a server measured from outside, with the help of its /metrics."""

from __future__ import annotations

from ridgeline.measure.metrics.remote_utilisation import RemoteUtilisation, remote_utilisation
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.records import RunTrace
from ridgeline.workflows.targets import ModelOnDevice


def server_utilisation(
    run: RunTrace, report: ServerReport | None, device: ModelOnDevice
) -> RemoteUtilisation | None:
    """Utilisation over the whole run; None if nothing was generated."""
    return remote_utilisation(
        run,
        device.price,
        device.peaks,
        cached_share=(report and hit_share(report)) or 0.0,
        num_steps=steps_of_run(run, report),
    )


def steps_of_run(run: RunTrace, report: ServerReport | None) -> float | None:
    """The run's share of the steps that the server counted; None if it counts none.

    Other clients may have used the server too: the share is that of the generated tokens.
    """
    counts = {} if report is None else report.counts
    steps, generated = counts.get("num_steps"), counts.get("output_tokens")
    if steps and generated:
        steps *= min(1.0, sum(request.output_tokens for request in run.requests) / generated)
    return steps


def hit_share(report: ServerReport) -> float | None:
    """Share of prompt tokens found in the prefix cache: by counters, else by a gauge."""
    if report.counts.get("queried_tokens"):
        return report.counts.get("hit_tokens", 0.0) / report.counts["queried_tokens"]
    return report.means.get("hit_share")
