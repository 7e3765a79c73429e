"""Benchmark an engine in this process, or a server, and say what bounds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config.load import BenchOptions, BenchReport
from ridgeline.config.settings import Settings
from ridgeline.diagnose import facts_of, time_shares, verdict
from ridgeline.measure.bench_options import check_options
from ridgeline.measure.metrics.goodput import goodput
from ridgeline.measure.metrics.latency import outcome
from ridgeline.measure.metrics.remote_utilisation import RemoteUtilisation
from ridgeline.measure.metrics.run_cost import RunCost, cost_of_run
from ridgeline.measure.metrics.step_metrics import (
    LatencyBounds,
    PhaseOrAll,
    Utilisation,
    latency_bounds,
    utilisation,
)
from ridgeline.measure.metrics.summary import Summary, summarise
from ridgeline.measure.metrics.window import window_of
from ridgeline.measure.report.bench_page import MonitorTable, bench_page
from ridgeline.measure.report.chrome_trace import chrome_trace
from ridgeline.measure.report.vllm_block import vllm_block
from ridgeline.measure.results import event_log_parquet
from ridgeline.measure.results.event_log import RunContext, write_run
from ridgeline.measure.results.vllm_result import vllm_result
from ridgeline.records import RunTrace
from ridgeline.records.progress import Observer, silent
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line, plain
from ridgeline.report.output_paths import check_file
from ridgeline.report.result import Result
from ridgeline.roofline import Peaks
from ridgeline.workflows.bench.observed_tables import observed_tables
from ridgeline.workflows.diagnose.diagnose_run import diagnose_run
from ridgeline.workflows.diagnose.finding_text import first_finding
from ridgeline.workflows.load.load_session import load_session, run_context
from ridgeline.workflows.load.server_monitor import Observed
from ridgeline.workflows.load.server_tokenizer import NormalisedTokens, normalised_tokens
from ridgeline.workflows.load.server_utilisation import server_utilisation
from ridgeline.workflows.load.token_workload import load_for
from ridgeline.workflows.run_async import run_async
from ridgeline.workflows.targets import ModelOnDevice, Target

NO_BOUNDS = LatencyBounds(ttft_s=None, tpot_s=None, e2e_s=None, output_tok_s=None)


class BenchResult(Result, frozen=True, kw_only=True):
    """One benchmark run.

    `summary`: latencies, throughput and goodput. `bounds`: the roofline's limit of each figure, and
    `utilisation` by phase, for an engine in this process on a machine that was probed. `use`: MFU
    and MBU of a server whose hardware is known. `diagnosis`: what bounds the run, in a sentence.
    `normalised`: the tokens of a server's answers as `--tokenizer` counts them.
    """

    options: BenchOptions
    run: RunTrace
    summary: Summary
    observed: Observed
    context: RunContext
    diagnosis: str
    in_process: bool
    bounds: LatencyBounds = NO_BOUNDS
    utilisation: dict[PhaseOrAll, Utilisation] = {}
    peaks: Peaks | None = None
    device_name: str = ""
    use: RemoteUtilisation | None = None
    cost: RunCost | None = None
    normalised: NormalisedTokens | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result under the keys of `vllm bench serve`; more under the key `ridgeline`."""
        result: dict[str, Any] = vllm_result(
            self.run, self.summary, percentiles=self.options.percentiles
        )
        more = result["ridgeline"]
        if self.observed.server is not None:
            more["server"] = msgspec.to_builtins(self.observed.server)
        more["machine"] = msgspec.to_builtins(self.observed.machine)
        if self.use is not None:
            more["use"] = msgspec.to_builtins(self.use)
        if self.cost is not None:
            more["cost"] = msgspec.to_builtins(self.cost)
        energy = self.observed.machine.energy
        if energy is not None and energy.joules is not None and self.summary.output_tokens:
            more["joules_per_output_token"] = energy.joules / self.summary.output_tokens
        if self.normalised is not None:
            more["normalised"] = msgspec.to_builtins(self.normalised)
        return dict(plain(result))

    def to_html(self) -> str:
        """A page with distributions and a timeline."""
        return bench_page(
            self.run, self.summary, self.options.slo, cost=self.cost, monitors=self.tables()
        )

    def to_vllm_text(self) -> str:
        """The result as `vllm bench serve` prints it."""
        return vllm_block(self.to_dict(), self.options.metrics, self.options.percentiles)

    def tables(self) -> list[MonitorTable]:
        """What was observed: the server's metrics, its device, the machine."""
        return observed_tables(
            self.observed,
            self.use,
            self.device_name,
            in_process=self.in_process,
            num_tokens=self.summary.output_tokens,
        )

    def save_log(self, path: str | Path) -> Path:
        """Write every request and step: JSON lines, or a table if the path ends in .parquet."""
        write_run(self.run, Path(path), self.context)
        return Path(path)

    def save_trace(self, path: str | Path) -> Path:
        """Write a Chrome trace, for Perfetto."""
        write_file(Path(path), [json_line(chrome_trace(self.run)).encode()])
        return Path(path)


def check_outputs(report: BenchReport) -> None:
    """BadInput for an output file that cannot be written, before anything is measured."""
    files = {
        "--output-json": report.output_json,
        "--log": report.log,
        "--html": report.html,
        "--trace": report.trace,
    }
    for flag, path in files.items():
        if path is not None:
            check_file(path, flag)
    if report.log is not None and event_log_parquet.is_parquet(report.log):
        event_log_parquet.load_pyarrow(report.log)


def bench(
    options: BenchOptions,
    target: Target,
    *,
    dollars_per_hour: float | None = None,
    observer: Observer = silent,
) -> BenchResult:
    """Send the load of the options to an engine (given by its settings) or to a server.

    `dollars_per_hour`: what the machine costs, to add the cost of tokens and requests. Raises
    UserError before anything is measured if an option is wrong.
    """
    check_options(options)
    options = load_for(options, target, observer)
    with load_session(options, target, observer) as session:
        run, observed = run_async(session.run(options))
        device = session.device(run)
    context = run_context(options, observed)
    summary = summarise(run, options.slo, window_of(run, options.warmup_s, options.cooldown_s))
    result = BenchResult(
        options=options,
        run=run,
        summary=summary,
        observed=observed,
        context=context,
        diagnosis=bench_diagnosis(run, options, device, context),
        in_process=isinstance(target, Settings),
        cost=cost_of_run(run, summary, dollars_per_hour),
        normalised=None
        if isinstance(target, Settings)
        else normalised_tokens(run, options, target.tokenizer),
    )
    return result if device is None else with_roofline(result, device)


def with_roofline(result: BenchResult, device: ModelOnDevice) -> BenchResult:
    """The result with its bounds and utilisation on the device."""
    run = result.run
    if not result.in_process:
        use = server_utilisation(run, result.observed.server, device)
        return msgspec.structs.replace(result, use=use, device_name=device.name)
    return msgspec.structs.replace(
        result,
        bounds=latency_bounds(run, device.price, device.peaks),
        utilisation=utilisation(run, device.price, device.peaks),
        peaks=device.peaks,
        device_name=device.name,
    )


def bench_diagnosis(
    run: RunTrace, options: BenchOptions, device: ModelOnDevice | None, context: RunContext
) -> str:
    """One sentence: what bounds the run; for a server without step records, its main loss."""
    if not any(outcome(request) == "ok" for request in run.requests):
        return "No request succeeded: there is nothing to diagnose but the errors above."
    if not run.steps:
        diagnosis = diagnose_run(run, context, options.slo)
        missed = 0.0 if options.slo is None else 1 - goodput(run, options.slo).attainment
        return first_finding(diagnosis.findings, diagnosis.losses, missed)
    shares = None
    if device is not None:
        shares = time_shares(run.steps, run.duration_s, device.price, device.peaks)
    return verdict(facts_of(run, options.slo, shares)).sentence
