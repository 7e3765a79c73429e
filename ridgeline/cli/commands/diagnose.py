"""The flags of `ridgeline diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ridgeline.cli.params.engine import EngineFlags, refuse, takes_engine_flags
from ridgeline.cli.params.load import takes_load_flags
from ridgeline.report.files import write_file
from ridgeline.report.json_line import json_line

if TYPE_CHECKING:
    from rich.console import Console

    from ridgeline.config.settings import Settings
    from ridgeline.measure.bench_options import BenchOptions
    from ridgeline.workflows.diagnose.diagnose import ReferenceDevice
    from ridgeline.workflows.targets import Target

PROFILED = ("workload", "max_concurrency", "random_input_len", "random_output_len")
"""The load flags that say what is profiled."""


Accelerator = Annotated[
    str | None,
    typer.Option(
        help="With --url or --run, and MODEL: draw the roofline of what it ran on "
        "(h100-sxm, 4xh100-sxm, here)."
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command()(diagnose)


@takes_engine_flags
@takes_load_flags
def diagnose(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face model directory, 'demo', or 'dummy:SHAPE' (random weights).",
            show_default="demo",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Measure and judge the server here.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Judge a recorded run: a bench --log, or its folder.", metavar="PATH"),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Time each operator of prefill and decode steps.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier run of the same model here: was it faster?", metavar="FILE"),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="With --url: the model to ask for (default: its first).")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="With --url: the server's key.")
    ] = None,
    nsight: Annotated[
        Path | None, typer.Option(help="Judge a CSV export of nsys or ncu.", metavar="FILE")
    ] = None,
    accelerator: Accelerator = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the roofline.", metavar="FILE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    load: dict[str, Any],
    engine: EngineFlags,
) -> None:
    """Say what latency is lost to, ranked, with the flag that gives it back.

    With --profile: run prefill and decode steps of the workload on an engine here, and say of each
    operator what it took and how near that is to its bound.
    """
    sources = {"--nsight": nsight, "--run": run, "--url": url, "--profile": profile}
    asked = [name for name, value in sources.items() if value]
    beside = {"--baseline": baseline, "--served-model-name": served_model_name}
    beside |= {"--accelerator": accelerator} if run is None and url is None else {}
    beside |= {str(model): model} if accelerator is None else {}
    given = [*asked[1:], *(name for name, value in beside.items() if value)]
    if nsight is not None:
        page = ["--html"] if html else []
        refuse([*engine.given, *_flags(load), *given, *page], "with --nsight")
        raise typer.Exit(run_nsight(nsight, json))
    from ridgeline.measure.bench_options import BenchOptions
    from ridgeline.workflows.diagnose.diagnose import ReferenceDevice
    from ridgeline.workflows.targets import RemoteServer

    refuse(["--stream"] if "stream" in load else [], "here: latency is judged token by token")
    amount = {"num_prompts": None} if "duration_s" in load else {}
    options = BenchOptions(**{**amount, **load}, seed=engine.seed)
    idle = [flag for flag in engine.given if flag != "--seed"]
    reference = None
    if accelerator is not None:
        reference = ReferenceDevice(model=model, accelerator=accelerator)
    outputs = DiagnoseOutputs(html=html, json=json)
    if run is not None:
        loads = [flag for flag in _flags(load) if flag != "--goodput"]
        refuse([*idle, *loads, *(g for g in given if g != "--baseline")], "with --run")
        raise typer.Exit(
            run_diagnose(options, run, outputs, baseline=baseline, reference=reference)
        )
    if url is not None:
        refuse([*idle, *(g for g in given if g != "--served-model-name")], "with --url")
        server = RemoteServer(url=url, model=served_model_name, api_key=api_key)
        raise typer.Exit(run_diagnose(options, server, outputs, reference=reference))
    refuse(["--served-model-name"] if served_model_name else [], "without --url")
    refuse(["--accelerator"] if accelerator else [], "without --url or --run: it is here")
    if profile:
        others = [name for name in load if name not in PROFILED]
        refuse([*_flags(others), *(["--baseline"] if baseline else [])], "with --profile")
        raise typer.Exit(run_profile(options, engine.settings(model), outputs))
    raise typer.Exit(run_diagnose(options, engine.settings(model), outputs, baseline=baseline))


class DiagnoseOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """A page to write, and whether to print JSON."""

    html: Path | None = None
    json: bool = False


def run_diagnose(
    options: BenchOptions,
    source: Target | Path,
    outputs: DiagnoseOutputs,
    *,
    baseline: Path | None = None,
    reference: ReferenceDevice | None = None,
    console: Console | None = None,
) -> int:
    """Diagnose, print and write; the exit code. Raises UserError if no request was served."""
    from rich.console import Console

    from ridgeline.cli.render.diagnose import print_diagnosis
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.workflows.diagnose.diagnose import diagnose as make_diagnosis

    with live_progress() as observer:
        diagnosis = make_diagnosis(
            options, source, baseline=baseline, reference=reference, observer=observer
        )
    if outputs.json:
        print(json_line(diagnosis.to_dict()))
    else:
        print_diagnosis(diagnosis, console or Console(highlight=False, soft_wrap=True))
    if outputs.html is not None:
        write_file(outputs.html, [diagnosis.to_html().encode()])
    return 0


def run_profile(
    options: BenchOptions,
    settings: Settings,
    outputs: DiagnoseOutputs,
    console: Console | None = None,
) -> int:
    """Profile, print and write; the exit code."""
    from rich.console import Console

    from ridgeline.cli.render.diagnose import print_profile
    from ridgeline.cli.render.live_progress import live_progress
    from ridgeline.workflows.diagnose.operator_profile import profile_operators

    with live_progress() as observer:
        result = profile_operators(options, settings, observer)
    if outputs.json:
        print(json_line(result.to_dict()))
    else:
        print_profile(result, console or Console(highlight=False, soft_wrap=True))
    if outputs.html is not None:
        write_file(outputs.html, [result.to_html().encode()])
    return 0


def run_nsight(path: Path, as_json: bool, console: Console | None = None) -> int:
    """Diagnose an export of NVIDIA's profilers and print it; the exit code."""
    from rich.console import Console

    from ridgeline.cli.render.diagnose import print_nsight
    from ridgeline.workflows.diagnose.nsight_export import diagnose_nsight

    result = diagnose_nsight(path)
    if as_json:
        print(json_line(result.to_dict()))
    else:
        print_nsight(result, console or Console(highlight=False, soft_wrap=True))
    return 0


def _flags(names: Any) -> list[str]:
    return ["--" + name.replace("_", "-") for name in names]
