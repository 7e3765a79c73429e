"""Simulate a fleet under a load on a virtual clock, with the engine's own scheduler."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.config.planning import SimulateOptions
from ridgeline.measure.metrics.summary import summarise as summarise_run
from ridgeline.measure.report.bench_page import bench_page
from ridgeline.measure.report.chrome_trace import chrome_trace
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.records import FleetOutcome
from ridgeline.plan.simulate.summary import FleetSummary, summarise, traces
from ridgeline.plan.step_time.replica import Replica
from ridgeline.records import RunTrace
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line, plain
from ridgeline.report.result import Result
from ridgeline.workflows.load.workload_lengths import ISL, OSL, is_text
from ridgeline.workflows.planning.simulated_fleet import fleet_plan, kinds_of
from ridgeline.workflows.planning.simulated_load import requests_of

MAX_TRACED_REQUESTS = 4000  # in a Chrome trace, which viewers load as a whole


class SimulationResult(Result, frozen=True, kw_only=True):
    """One simulated run of a fleet. `replicas`: the kinds of replica it was made of."""

    options: SimulateOptions
    replicas: tuple[Replica, ...]
    outcome: FleetOutcome
    summary: FleetSummary
    notes: tuple[str, ...]

    @property
    def device_names(self) -> str:
        return " and ".join(replica.device.name for replica in self.replicas)

    def to_dict(self) -> dict[str, object]:
        """The summary's figures by name."""
        return dict(plain(self.summary))

    def to_html(self) -> str:
        """The page of a measured run, over all simulated requests."""
        run = self._run(len(self.outcome.requests))
        slo = self.options.parsed_slo
        # The simulator keeps no times between the first and the last token: gaps are unknown.
        summary = msgspec.structs.replace(summarise_run(run, slo), itl=None, itl_chunk=None)
        return bench_page(run, summary, slo)

    def save_trace(self, path: str | Path) -> Path:
        """Write a Chrome trace, for Perfetto, of at most `MAX_TRACED_REQUESTS` requests."""
        events = chrome_trace(self._run(MAX_TRACED_REQUESTS))
        write_file(Path(path), [json_line(events).encode()])
        return Path(path)

    def _run(self, max_requests: int) -> RunTrace:
        options = self.options
        lengths = f"synthetic:input={options.input_len or ISL},output={options.output_len or OSL}"
        return RunTrace(
            target=f"{options.replicas} x {options.model} on {self.device_names} (simulated)",
            workload=options.workload or lengths,
            arrivals=f"poisson:{options.request_rate:g}"
            if options.replay_speed is None
            else "recorded",
            seed=options.seed,
            started_unix_s=0.0,
            duration_s=self.outcome.duration_s,
            requests=traces(self.outcome, max_requests),
        )


SETTLED = 100
"""Requests per request in flight from which the ends of a run hardly count."""


def simulate(options: SimulateOptions) -> SimulationResult:
    """Simulate one run. The options, with their seed, determine every number.

    Raises UserError if the options contradict each other or the model does not fit.
    """
    requests = requests_of(options)
    kinds = kinds_of(options)
    own = [request for request in requests if request.model in ("", options.model)]
    longest = max(request.num_prompt + request.num_output for request in own)
    plan = fleet_plan(options, kinds, longest)
    gc.disable()  # there are no reference cycles here, and millions of live records to scan
    try:
        outcome = simulate_fleet(requests, plan)
    finally:
        gc.enable()
    replicas = tuple(replica for replica, _ in kinds)
    summary = summarise(outcome, options.parsed_slo)
    return SimulationResult(
        options=options,
        replicas=replicas,
        outcome=outcome,
        summary=summary,
        notes=(*_notes(options, replicas), *_length_note(summary)),
    )


def _length_note(summary: FleetSummary) -> Iterator[str]:
    """A run that is short against its requests: percentiles differ by seed, and `plan`'s are of the
    steady state."""
    if 0 < summary.num_requests < SETTLED * summary.mean_in_flight:
        yield (
            f"a run of {summary.num_requests:,} requests begins and ends idle, and its percentiles "
            f"vary with --seed; those of `plan` are of a load that lasts: --num-prompts "
            f"{max(10_000, 10 * summary.num_requests)}"
        )


def _notes(options: SimulateOptions, replicas: tuple[Replica, ...]) -> list[str]:
    """What a reader must know to judge the numbers."""
    worst = max(replicas, key=lambda replica: replica.tpot_error)
    efficiency = worst.efficiency
    notes = [
        f"step times are modelled ({efficiency.as_of}); the median error of such models on this "
        f"device is {worst.tpot_error:.0%} (TPOT) and {efficiency.ttft_error:.0%} (TTFT)"
    ]
    if options.further_models is not None:
        notes.append(
            "several models share each device: their steps take turns, each model has its part of "
            "the memory, and what switching between them costs is not counted"
        )
    if worst.layout.pp > 1 or worst.layout.num_attention > 1:
        notes.append(
            "each pipeline stage or attention group has its own scheduler, with an equal part of "
            "the KV cache; every step is planned"
        )
    if options.workload is not None and is_text(options.workload):
        notes.append("the workload is text: lengths are estimated at four bytes per token")
    calibration = worst.calibration
    if calibration is not None and calibration.interference is not None:
        notes.append(
            f"interference on the machine is replayed from {calibration.interference.span_s:.0f} s "
            "recorded at calibration, from a point that the seed chooses and at its median level; "
            "--num-seeds 40 samples the level, the run-to-run variance and the model error"
        )
    if options.batch_share:
        since = "when they may start" if options.completion_window is None else "their arrival"
        notes.append(
            "SLO, TTFT, TPOT and e2e are of interactive requests; batch requests count from "
            f"{since}"
        )
    if options.response_cache_size is not None:
        notes.append(
            "the response cache of each replica answers recorded prompts that repeat with the same "
            "number of output tokens, as if every request were greedy or seeded"
        )
    if options.semantic_cache_share:
        notes.append(
            "each question without an exact answer is embedded, which is counted as that many more "
            "prompt tokens of its request"
        )
    if options.kv_tier_memory is not None or options.kv_tier_size is not None:
        notes.append(
            "tiers of the KV cache: loads and copies are timed by their bandwidths, writes to "
            "files take no time; every step is planned"
        )
    if not options.enable_prefix_caching:
        notes.append("prefix caching is off")
    return notes
