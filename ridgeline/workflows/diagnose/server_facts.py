"""Facts about a run for the diagnosis: from the client's trace and the server's /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.diagnose import facts_of
from ridgeline.diagnose.conditions import Value
from ridgeline.measure.monitors.server_metrics import ServerReport
from ridgeline.records import RunTrace, Slo

RENAMED = {
    "kv_used_share": "kv_used_share_p95",
    "mean_running": "running",
    "mean_waiting": "waiting",
    "preemptions": "preemptions",
}
"""Fact of an engine's steps → metric of a server that says the same."""


def server_metrics(report: ServerReport | None, run: RunTrace) -> dict[str, float]:
    """A server's report as one flat mapping; its totals per served request where it has no
    histogram.

    A queue time that no metric gives follows from the mean number of waiting requests (Little's
    law: waiting = arrival rate × waiting time).
    """
    if report is None:
        return {}
    metrics = {**report.counts, **report.mean_s, **report.means}
    num_served = sum(1 for request in run.requests if request.token_s)
    if num_served and "prefill_total_s" in metrics:
        metrics.setdefault("prefill_s", metrics["prefill_total_s"] / num_served)
    if num_served and "waiting_total_s" in metrics:
        metrics["waited_s"] = metrics["waiting_total_s"] / num_served
    elif num_served and "waiting" in metrics:
        metrics["waited_s"] = metrics["waiting"] * run.duration_s / num_served
    for cause in ("full_waiting", "spent_waiting"):
        if metrics.get("waiting_total_s") and f"{cause}_total_s" in metrics:
            share = metrics[f"{cause}_total_s"] / metrics["waiting_total_s"]
            metrics[f"{cause}_share"] = share
    if "waited_s" in metrics and "prefill_s" not in metrics:
        metrics.setdefault("queue_s", metrics["waited_s"])
    return {**metrics, **{f"{name}_p95": value for name, value in report.p95.items()}}


def run_facts(run: RunTrace, slo: Slo | None, metrics: Mapping[str, float]) -> dict[str, Value]:
    """The client's facts, completed by the server's metrics under the names of an engine's facts.

    A server that does not report its slots has as many as ran while requests were waiting.
    """
    server: dict[str, Value] = {
        name: metrics[metric] for name, metric in RENAMED.items() if metric in metrics
    }
    if "slots" in metrics:
        server["max_num_seqs"] = round(metrics["slots"])
    elif metrics.get("waiting_p95", 0.0) > 0 and "running_p95" in metrics:
        server["max_num_seqs"] = round(metrics["running_p95"])
    server |= {name: value for name, value in metrics.items() if name.startswith("gpu_")}
    facts = {**server, **facts_of(run, slo)}
    if metrics.get("queried_tokens") and not facts.get("cached_prompt_share"):
        facts["cached_prompt_share"] = metrics["hit_tokens"] / metrics["queried_tokens"]
    elif "hit_share" in metrics and not facts.get("cached_prompt_share"):
        facts["cached_prompt_share"] = metrics["hit_share"]
    return facts
