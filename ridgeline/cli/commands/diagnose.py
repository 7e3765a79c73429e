"""The flags of `ridgeline diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.params.engine import EngineFlags, refuse, takes_engine_flags
from ridgeline.cli.params.load import takes_load_flags

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
        from ridgeline.cli.commands.nsight import command as judge_export

        raise typer.Exit(judge_export(nsight, json))
    from ridgeline.measure.bench import BenchOptions
    from ridgeline.workflows.bench.bench import Remote
    from ridgeline.workflows.diagnose.diagnose import Held, command

    refuse(["--stream"] if "stream" in load else [], "here: latency is judged token by token")
    amount = {"num_prompts": None} if "duration_s" in load else {}
    options = BenchOptions(**{**amount, **load}, seed=engine.seed)
    idle = [flag for flag in engine.given if flag != "--seed"]
    held = Held(model=model, accelerator=accelerator) if accelerator is not None else None
    if run is not None:
        loads = [flag for flag in _flags(load) if flag != "--goodput"]
        refuse([*idle, *loads, *(g for g in given if g != "--baseline")], "with --run")
        raise typer.Exit(
            command(options, run, baseline=baseline, held=held, as_json=json, html=html)
        )
    if url is not None:
        refuse([*idle, *(g for g in given if g != "--served-model-name")], "with --url")
        server = Remote(url=url, model=served_model_name, api_key=api_key)
        raise typer.Exit(command(options, server, held=held, as_json=json, html=html))
    refuse(["--served-model-name"] if served_model_name else [], "without --url")
    refuse(["--accelerator"] if accelerator else [], "without --url or --run: it is here")
    if profile:
        others = [name for name in load if name not in PROFILED]
        refuse([*_flags(others), *(["--baseline"] if baseline else [])], "with --profile")
        from ridgeline.workflows.diagnose.operator_profile import command as profile_command

        raise typer.Exit(profile_command(options, engine.settings(model), json, html))
    settings = engine.settings(model)
    raise typer.Exit(command(options, settings, baseline=baseline, as_json=json, html=html))


def _flags(names: Any) -> list[str]:
    return ["--" + name.replace("_", "-") for name in names]
