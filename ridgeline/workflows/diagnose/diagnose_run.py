"""Diagnose a run: what its latency is lost to, ranked by how much there is to gain.

An engine of ours is judged by its step records; any other server by its /metrics and the times at
which the client saw tokens.
"""

from __future__ import annotations

from typing import cast

from ridgeline.diagnose import (
    LatencyLosses,
    RankedFinding,
    attribute_latency,
    attribute_server_latency,
    batch_facts,
    findings,
    missed_prefix,
    split_gpu_losses,
    step_facts,
)
from ridgeline.diagnose.losses.latency_losses import Expected
from ridgeline.diagnose.losses.observed_steps import infer_steps_from_tokens
from ridgeline.diagnose.rules.rulebook import Server
from ridgeline.measure.monitors.machine_monitor import MachineReport
from ridgeline.measure.monitors.server_config import ELSEWHERE
from ridgeline.measure.results.event_log import RunContext
from ridgeline.records import RunTrace, Slo
from ridgeline.report.result import Result
from ridgeline.workflows.diagnose.diagnosis_page import diagnosis_page
from ridgeline.workflows.diagnose.roofline_points import RunRoofline
from ridgeline.workflows.diagnose.server_facts import run_facts, server_metrics


class Diagnosis(Result, frozen=True, kw_only=True):
    """The findings, the most worthwhile first, and the losses of latency that they rest on.

    `losses` is None if no request was served. `metrics`: what the server and its machine reported.
    `roof`: prefill, decode and mixed steps under the peaks of the device, if it is known.
    """

    target: str
    server: str
    findings: tuple[RankedFinding, ...]
    losses: LatencyLosses | None
    metrics: dict[str, float] = {}
    roof: RunRoofline | None = None

    def to_html(self) -> str:
        """Losses, findings and roofline."""
        return diagnosis_page(self)


def diagnose_run(
    run: RunTrace, context: RunContext, slo: Slo | None, expected: Expected | None = None
) -> Diagnosis:
    """Diagnose a run that was just measured, or one read from its log.

    `expected`: step times learnt from an earlier run on the same machine.
    """
    report = context.server
    metrics = {**server_metrics(report, run), **machine_facts(context.machine, run)}
    missed = missed_prefix(run, context.shared_prompt_share, metrics)
    if run.steps:
        token_budget = run.info.settings.get("max_num_batched_tokens") if run.info else None
        losses = attribute_latency(
            run,
            missed_prefix=missed,
            expected=expected,
            token_budget=token_budget if isinstance(token_budget, int) else None,
        )
    else:
        losses = attribute_server_latency(run, metrics, missed)
    losses = None if losses is None else split_gpu_losses(losses, run, metrics)
    server = cast("Server", report.server if report else _server_of(run))
    facts = {**run_facts(run, slo, metrics), **step_facts(run, expected)}
    if not run.steps:
        facts.update(batch_facts(infer_steps_from_tokens(run)))
    facts["missed_prefix_share"] = missed
    facts.setdefault("cpu_taken_share", 0.0)  # not observed: no reason to suspect other processes
    ranked = findings(losses, facts, server) if losses is not None else ()
    return Diagnosis(
        target=run.target, server=server, findings=ranked, losses=losses, metrics=metrics
    )


def machine_facts(machine: MachineReport, run: RunTrace) -> dict[str, float]:
    """What was observed of the server's machine; no GPU if the server says that it uses none."""
    facts = machine.facts()
    if run.info is None or not (run.info.device == "cpu" or run.info.twin):
        return facts
    return {name: value for name, value in facts.items() if not name.startswith("gpu_")}


def _server_of(run: RunTrace) -> Server:
    """Without /metrics: a Ridgeline server describes itself in full, others only as elsewhere."""
    return "ridgeline" if run.info is not None and run.info.device != ELSEWHERE else "another"
