"""`ridgeline bench`: measure an engine in this process, or a server anywhere, and say what bounds
it.

The parts do the work: `measure` runs the load and sums it up, `spec` prices the steps, `hardware`
knows the peaks, `diagnose` names the bound. Here they meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from rich.console import Console
from rich.progress import Progress

from ridgeline.cli.render.bench import Physics, render
from ridgeline.cli.validate.output_paths import check_file
from ridgeline.config.settings import Settings
from ridgeline.diagnose import facts_of, time_shares, verdict
from ridgeline.errors import BadInput, CannotRun, UserError
from ridgeline.measure import log_parquet
from ridgeline.measure.bench import BenchOptions, check, run_bench, workload_of
from ridgeline.measure.client import OnFinish, OnStart
from ridgeline.measure.cost import cost_line, cost_of_run
from ridgeline.measure.http import Endpoint, HttpTarget, first_model, wire_to
from ridgeline.measure.inprocess import InProcessTarget, RenderChat
from ridgeline.measure.log import Beside, write_run
from ridgeline.measure.metrics import outcome
from ridgeline.measure.report.page import bench_page
from ridgeline.measure.report.perfetto import chrome_trace
from ridgeline.measure.report.vllm_block import vllm_block
from ridgeline.measure.server.config import info_of
from ridgeline.measure.summary import summarise
from ridgeline.measure.target import Target
from ridgeline.measure.vllm_result import vllm_result
from ridgeline.measure.window import window_of
from ridgeline.measure.workload import Chat, plain_chat
from ridgeline.measure.workload.sharing import shared_of
from ridgeline.records import EngineInfo, RequestTrace, RunTrace
from ridgeline.report.files import write_file
from ridgeline.roofline import Peaks, PriceStep
from ridgeline.workflows.load import server_utilisation
from ridgeline.workflows.load.server_monitor import Seen, watched

if TYPE_CHECKING:
    from ridgeline.engine.config import ResolvedSettings
    from ridgeline.engine.engine import Engine
    from ridgeline.hardware.machine import Machine


Layout = Literal["ridgeline", "vllm"]
SAMPLE = 200  # requests that stand for a load


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A server to measure instead of an engine here. `model` None: the first that it lists.

    `shape` and `accelerator`: the model's directory and what the server runs on, for its MFU.
    """

    url: str
    model: str | None = None
    shape: str | None = None
    accelerator: str | None = None
    endpoint: Endpoint = "auto"
    api_key: str | None = None


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """Files to write: the result under vLLM's keys, the event log, an HTML page, a Chrome trace.

    `layout` is that of the console; `dollars_per_hour` adds what it cost.
    """

    json: Path | None = None
    log: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    layout: Layout = "ridgeline"
    dollars_per_hour: float | None = None

    @property
    def paths(self) -> dict[str, Path]:
        """By flag."""
        files = {"--json": self.json, "--log": self.log, "--html": self.html, "--trace": self.trace}
        return {flag: path for flag, path in files.items() if path is not None}


def command(
    options: BenchOptions,
    on: Settings | Remote,
    outputs: Outputs | None = None,
    console: Console | None = None,
) -> int:
    """Measure, print, write; the exit code: 1 where no request succeeded. Raises UserError."""
    outputs, console = outputs or Outputs(), console or Console(highlight=False)
    check(options)
    check_writable(outputs)
    device_of(on)  # a wrong name must not cost the run
    run, physics, seen = measure(options, on, console)
    device = device_of(on, run.info)
    report = seen.server
    summary = summarise(run, options.slo, window_of(run, options.warmup_s, options.cooldown_s))
    result = vllm_result(run, summary, percentiles=options.percentiles)
    use = None if device is None else server_utilisation.used(run, report, device)
    if report is not None:
        result["ridgeline"]["server"] = msgspec.to_builtins(report)  # type: ignore[index]
    result["ridgeline"]["machine"] = msgspec.to_builtins(seen.machine)  # type: ignore[index]
    if use is not None:
        result["ridgeline"]["use"] = msgspec.to_builtins(use)  # type: ignore[index]
    beside = server_utilisation.tables(seen, use, device, in_process=isinstance(on, Settings))
    cost = cost_of_run(run, summary, outputs.dollars_per_hour)
    if outputs.layout == "vllm":
        console.print(vllm_block(result, options.metrics, options.percentiles), markup=False)
    else:
        console.print(render(run, summary, options, physics))
        for each in beside:
            console.print(server_utilisation.on_console(each))
        console.print(diagnosis(run, options, physics, beside_of(options, seen)), markup=False)
    if cost is not None:
        console.print(cost_line(cost), markup=False)
        result["ridgeline"]["cost"] = msgspec.to_builtins(cost)  # type: ignore[index]
    write_outputs(
        outputs,
        run,
        result,
        lambda: bench_page(run, summary, options.slo, cost=cost, beside=beside),
        beside_of(options, seen) if outputs.log is not None else None,
    )
    return 0 if summary.num_ok else 1


def device_of(
    on: Settings | Remote, info: EngineInfo | None = None
) -> server_utilisation.Device | None:
    """What a server runs on; `info`: how it is set up, where it has said so."""
    if isinstance(on, Settings) or on.shape is None or on.accelerator is None:
        return None
    return server_utilisation.device_of(on.shape, on.accelerator, info)


def check_writable(outputs: Outputs) -> None:
    """Before anything is measured: a wrong place, or a missing library, must not cost the run."""
    for flag, path in outputs.paths.items():
        check_file(path, flag)
    if outputs.log is not None and log_parquet.wanted(outputs.log):
        log_parquet.require(outputs.log)


def write_outputs(
    outputs: Outputs,
    run: RunTrace,
    result: dict[str, object],
    page: Callable[[], str],
    beside: Beside | None = None,
) -> None:
    """Every file that was asked for."""
    if outputs.json is not None:
        write_file(outputs.json, [msgspec.json.encode(result), b"\n"])
    if outputs.log is not None:
        write_run(run, outputs.log, beside)
    if outputs.html is not None:
        write_file(outputs.html, [page().encode()])
    if outputs.trace is not None:
        write_file(outputs.trace, [msgspec.json.encode(chrome_trace(run))])


def beside_of(options: BenchOptions, seen: Seen) -> Beside:
    """What a log needs to be judged later as the run is judged now."""
    requests = list(workload_of(options).sample(SAMPLE, options.seed))
    return Beside(server=seen.server, machine=seen.machine, shared_prompt_share=shared_of(requests))


RunOne = Callable[[BenchOptions, OnStart], Awaitable[RunTrace]]


def measure(
    options: BenchOptions, on: Settings | Remote, console: Console
) -> tuple[RunTrace, Physics | None, Seen]:
    """One bench run, what it is to be held against where the engine is ours, and what was seen
    beside it.
    """
    where = (None, None) if isinstance(on, Settings) else (on.url, on.api_key)
    with session(options, on, console) as (run_one, physics):

        async def main() -> tuple[RunTrace, Seen]:
            return await watched(partial(run_one, options), *where)

        run, seen = asyncio.run(main())
    return run, physics, seen


@contextmanager
def session(
    options: BenchOptions, on: Settings | Remote, console: Console
) -> Iterator[tuple[RunOne, Physics | None]]:
    """A way to make runs, all against the same engine or server."""
    if isinstance(on, Remote):
        remote = on

        async def there(chosen: BenchOptions, on_start: OnStart) -> RunTrace:
            return await run_remote(chosen, remote, on_start)

        yield there, None
        return
    from ridgeline.engine.engine import Engine

    Console(stderr=True).print(f"loading {on.model} …", style="dim", markup=False)
    with Engine.from_settings(on) as engine:
        _check_prompts(engine, options)
        render_chat, note = chat_of(engine)
        if note:
            console.print(note, style="yellow", markup=False)

        async def here(chosen: BenchOptions, on_start: OnStart) -> RunTrace:
            target = InProcessTarget(engine, render_chat=render_chat)
            return await _run(target, chosen, on_start)

        yield here, physics_of(engine.resolved)


async def run_remote(
    options: BenchOptions, remote: Remote, on_start: OnStart | None = None
) -> RunTrace:
    model = remote.model or await first_model(remote.url, api_key=remote.api_key)
    target = HttpTarget(
        remote.url,
        model,
        endpoint=remote.endpoint,
        api_key=remote.api_key,
        stream=options.stream,
    )
    target.info = await _told_of(remote, model)
    return await _run(target, options, on_start)


async def _told_of(remote: Remote, model: str) -> EngineInfo | None:
    wire, prefix = wire_to(remote.url, remote.api_key)
    try:
        return await info_of(wire, prefix, model)
    finally:
        wire.close()


async def _run(target: Target, options: BenchOptions, on_start: OnStart | None) -> RunTrace:
    try:
        async with _progress(options) as on_finish:
            return await run_bench(target, options, on_finish=on_finish, on_start=on_start)
    finally:
        await target.close()


@asynccontextmanager
async def _progress(options: BenchOptions) -> AsyncIterator[OnFinish]:
    """A bar on a terminal's stderr; it redraws a few times a second, whatever the load."""
    console = Console(stderr=True)
    with Progress(
        console=console, refresh_per_second=2, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=options.num_prompts)

        def advance(trace: RequestTrace) -> None:
            bar.advance(task)

        yield advance


def _check_prompts(engine: Engine, options: BenchOptions) -> None:
    """A model without a tokenizer takes token ids only: say so before the load starts."""
    prompt = next(workload_of(options).sample(1, 0)).prompt
    if isinstance(prompt, tuple):
        return
    try:
        engine.tokenizer.encode("a")
    except UserError as error:
        raise BadInput(
            "this workload is text, and the model takes token ids only",
            value=options.workload,
            limit=error.what,
            fix="--workload synthetic:input=256,output=128",
        ) from None


def chat_of(engine: Engine) -> tuple[RenderChat, str]:
    """How conversations become prompts, and a note where the model has no template for them."""

    def template(chat: Chat) -> Sequence[int]:
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        return engine.tokenizer.apply_chat_template(messages)

    try:
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    except UserError as error:
        return plain_chat, f"conversations are sent as plain text: {error.what}"
    return template, ""


def price_of(resolved: ResolvedSettings) -> PriceStep:
    """The compulsory FLOPs and bytes of a step, from the spec with every technique applied."""
    from ridgeline.modelspec.cost import cost_model

    return cost_model(resolved.spec).step


def peaks_of(machine: Machine, resolved: ResolvedSettings) -> Peaks | None:
    """The probed ceilings for this model: bandwidth at the size of its weights, rate of its dtype.

    None where the machine was not measured in the dtype that the products are computed in.
    """
    from ridgeline.modelspec.cost import weight_bytes

    dtype = resolved.spec.layers[0].mlp.gate.format.activations
    if resolved.device.startswith("cuda"):
        gpu = machine.gpus[0]
        peak, bandwidth = gpu.gemm_flops.get(dtype), gpu.read_bandwidth_bytes_s
    else:
        peak, bandwidth = machine.peak_flops(dtype), machine.bandwidth(weight_bytes(resolved.spec))
    if peak is None or bandwidth is None:
        return None
    return Peaks(
        flops_s=peak,
        bytes_s=bandwidth,
        dtype=dtype,
        source="probe" + (" (disturbed: figures are too low)" if machine.disturbed else ""),
    )


def physics_of(resolved: ResolvedSettings) -> Physics | None:
    """Arithmetic and ceilings; None where this machine cannot be probed."""
    from ridgeline.hardware.probe import probe

    try:
        peaks = peaks_of(probe(), resolved)
    except CannotRun:
        return None
    if peaks is None:
        return None
    return Physics(price=price_of(resolved), peaks=peaks)


def diagnosis(run: RunTrace, options: BenchOptions, physics: Physics | None, beside: Beside) -> str:
    """One sentence: what bounds this run, with its evidence; of a server that keeps no steps, what
    most latency was lost to, by its own words.
    """
    if not any(outcome(request) == "ok" for request in run.requests):
        return "No request succeeded: there is nothing to diagnose but the errors above."
    if not run.steps:
        return _first_finding(run, options, beside)
    shares = None
    if physics is not None:
        shares = time_shares(run.steps, run.duration_s, physics.price, physics.peaks)
    return verdict(facts_of(run, options.slo, shares)).sentence


def _first_finding(run: RunTrace, options: BenchOptions, beside: Beside) -> str:
    from ridgeline.workflows.diagnose.diagnose import judged

    found = judged(run, beside, options.slo).findings
    if not found:
        return "No cause takes enough of the latency to be worth mending (`ridgeline diagnose`)."
    first = found[0]
    verdict = first.verdict.capitalize()
    return f"{verdict}: {first.sentence} {first.fix} Here: {first.flag}."
