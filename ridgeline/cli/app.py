"""Every subcommand's flags. Bodies import what they need when they run, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ridgeline.cli.commands import diagnose, explain, models
from ridgeline.cli.commands.planning import add_plan_commands
from ridgeline.cli.commands.terminal import add_terminal_commands
from ridgeline.cli.params.engine import EngineFlags, refuse, takes_engine_flags
from ridgeline.cli.params.load import WORKLOADS, takes_load_flags, takes_report_flags
from ridgeline.cli.params.server import takes_server_flags
from ridgeline.cli.params.target_server import server_options, takes_elsewhere_flags
from ridgeline.cli.params.units import duration_of, one_of
from ridgeline.cli.validate.preflight import look_first
from ridgeline.config.settings import NAIVE, Settings

if TYPE_CHECKING:
    from ridgeline.optimize.comparison.objective import Objective
    from ridgeline.workflows.targets import RemoteServer

app = typer.Typer(
    name="ridgeline",
    help="Makes LLM inference faster and cheaper, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_MODEL = "A Hugging Face model directory, 'demo', or 'dummy:SHAPE' (random weights)."
Model = Annotated[str, typer.Argument(help=_MODEL, show_default=False)]
_ENDPOINT = one_of("--endpoint", ("auto", "completions", "chat"))
_OBJECTIVE = one_of("--objective", ("goodput", "latency", "cost"))
_BUDGET = duration_of("--budget")
_SET_BY_THE_LADDER = ["--" + name.replace("_", "-") for name in NAIVE]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AnyModel = Annotated[str | None, typer.Argument(help=_MODEL, show_default="demo")]


def _tell_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version."),
]


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: _Version = False,
) -> None:
    """Makes LLM inference faster and cheaper, and proves it."""


def _end(code: int) -> None:
    if code:
        raise typer.Exit(code)


@app.command()
def version() -> None:
    """Print the version."""
    import ridgeline

    print(ridgeline.__version__)


@app.command()
def doctor(
    json: Json = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
) -> None:
    """Look at this machine: what it can do, and what to mend."""
    from ridgeline.cli.commands.doctor import command

    _end(command(json, refresh))


@app.command()
def inspect(
    model: Model,
    json: Json = False,
    against: Annotated[
        str | None, typer.Option(help="A quantised model's original: how far its weights are.")
    ] = None,
) -> None:
    """Print a model's arithmetic: parameters, FLOPs and bytes per token, KV cache.

    A quantised checkpoint is checked layer by layer; exit code 1 where a layer is faulty.
    """
    from ridgeline.cli.commands.inspect import command

    _end(command(model, json, against=against))


@app.command()
@takes_server_flags
@takes_engine_flags
def serve(
    model: AnyModel = None, *, engine: EngineFlags, server: dict[str, Any] | None = None
) -> None:
    """Serve a model over the OpenAI API."""
    from ridgeline.cli.commands.serve import command

    _end(command(*engine.resolve(model), server or {}))


@app.command("new-key")
def new_key(name: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Make an API key, and its entry for the file of --api-keys-file."""
    from ridgeline.cli.commands.serve import new_key as make

    make(name)


@app.command()
@takes_engine_flags
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    *,
    engine: EngineFlags,
) -> None:
    """Answer one prompt on the terminal, and tell how fast it was."""
    from ridgeline.cli.commands.generate import command
    from ridgeline.records import Sampling

    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop or ())
    )
    _end(command(engine.settings(model), prompt, sampling, chat=chat))


@app.command()
@takes_engine_flags
def batch(
    file: Annotated[Path, typer.Argument(help="Requests, one per line, as for /v1/batches.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the answers go.")],
    model: Annotated[str | None, typer.Option(help=_MODEL, show_default="demo")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What the lines call it (default: the model's name).")
    ] = None,
    *,
    engine: EngineFlags,
) -> None:
    """Answer a file of requests without a server; interrupted, the same command goes on."""
    from ridgeline.cli.commands.batch import command

    _end(command(engine.settings(model), file, output, served_model_name))


@app.command()
@takes_engine_flags
@takes_load_flags
@takes_report_flags
def bench(
    model: AnyModel = None,
    named: Annotated[
        str | None,
        typer.Option("--model", help="MODEL by vLLM's flag; with --url: the model to ask for."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure the OpenAI-compatible server at this address.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="With --url: the model to ask for (default: its first).")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="With --url: auto, completions or chat.", parser=_ENDPOINT),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="With --url: the server's key.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the result, under vLLM's keys.", metavar="FILE")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Write every request and step: JSON lines, or a table if FILE ends in .parquet.",
            metavar="FILE",
        ),
    ] = None,
    *,
    load: dict[str, Any],
    report: dict[str, Any],
    engine: EngineFlags,
) -> None:
    """Measure an engine here, or a server anywhere, and say what bounds it."""
    from ridgeline.cli.commands.bench import run_bench_options
    from ridgeline.measure.bench_options import BenchOptions
    from ridgeline.workflows.targets import RemoteServer

    amount = {"num_prompts": None} if "duration_s" in load else {}  # time ends it, not a number
    options = BenchOptions(**{**amount, **load}, seed=engine.seed)
    accelerator = report.pop("accelerator", None)
    if url is None:
        only = {
            "--served-model-name": served_model_name,
            "--endpoint": endpoint,
            "--accelerator": accelerator,
            "--model": named if model else None,
            "--stream": "stream" in load,
        }
        refuse([flag for flag, value in only.items() if value], "without --url")
        target: Settings | RemoteServer = engine.settings(model or named)
    else:
        refuse(_idle_beside_url(engine, model, accelerator), "with --url")
        refuse(["--accelerator"] if accelerator and not model else [], "without MODEL")
        refuse(["--model"] if named and served_model_name else [], "beside --served-model-name")
        there: dict[str, Any] = {"shape": model, "accelerator": accelerator, "api_key": api_key}
        there |= {"model": served_model_name or named, "endpoint": endpoint or "auto"}
        target = RemoteServer(url=url, **there)
    report |= {"json": json, "log": log}
    _end(run_bench_options(options, target, report, "request_rate" in load))


def _idle_beside_url(
    engine: EngineFlags, model: str | None, accelerator: str | None = None
) -> list[str]:
    """What would change nothing about a server that runs already."""
    idle = [flag for flag in engine.given if flag != "--seed"]
    return [*idle, *([model] if model and not accelerator else [])]


@app.command()
@takes_elsewhere_flags
@takes_engine_flags
def optimize(
    model: AnyModel = None,
    workload: Annotated[str, typer.Option(help=WORKLOADS)] = "chat-and-code",
    slo: Annotated[
        str | None,
        typer.Option(help="The promise, in ms (default: 'ttft:500 tpot:50 error:1%')."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What to improve: goodput, latency or cost.", parser=_OBJECTIVE)
    ] = "goodput",
    budget: Annotated[
        float, typer.Option(help="Time to spend (90s, 5m, 1h).", parser=_BUDGET, metavar="TIME")
    ] = "5m",  # type: ignore[assignment]  # the parser reads the default too
    price_per_hour: Annotated[
        float | None, typer.Option(help="What this machine costs, in dollars.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report and ridgeline.toml.")
    ] = Path("ridgeline-out"),
    ladder: Annotated[
        Path | None, typer.Option(help="A ladder.toml of your own, in place of ours.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Predict with this file of `ridgeline calibrate`.", metavar="FILE"),
    ] = None,
    *,
    elsewhere: dict[str, Any] | None = None,
    engine: EngineFlags,
) -> None:
    """Climb the ladder: measure, diagnose, apply, verify; keep only what is proven here."""
    idle = [flag for flag in engine.given if flag in _SET_BY_THE_LADDER]
    refuse(idle, "here: the ladder sets it")
    from ridgeline.cli.commands.optimize import OptimizeFiles, run_optimize
    from ridgeline.workflows.optimize.optimize import OptimizeOptions

    server = server_options(elsewhere or {})
    options = OptimizeOptions(
        workload=workload,
        slo=slo,
        objective=cast("Objective", objective),
        budget_s=budget,
        dollars_per_hour=price_per_hour,
        seed=engine.seed,
        ladder=ladder,
        calibration=calibration,
    )
    files = OptimizeFiles(output=output, config=engine.config)
    _end(run_optimize(engine.settings(model), options, files, server))


@app.command("mock-server")
def mock_server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8001,
    ttft_ms: Annotated[float, typer.Option(help="Model 'steady': time to first token.")] = 50.0,
    itl_ms: Annotated[float, typer.Option(help="Model 'steady': time between tokens.")] = 10.0,
    tokens_per_chunk: Annotated[int, typer.Option(help="Model 'steady': tokens per chunk.")] = 1,
    seats: Annotated[
        int | None, typer.Option(help="Most requests at once; the others queue.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="At the end, write when each token was sent.")
    ] = None,
    list_scripts: Annotated[bool, typer.Option("--list", help="Print the scripts.")] = False,
) -> None:
    """Serve scripted answers: ground truth for a load tool. The model's name chooses the script."""
    from ridgeline.cli.commands.mock_server import command, describe
    from ridgeline.measure.mock.pace import Pace

    if list_scripts:
        _end(describe())
        return
    pace = Pace(ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000, per_chunk=tokens_per_chunk, seats=seats)
    _end(command(host, port, pace, log))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A result file, or a folder of repeated runs.")],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    threshold: Annotated[float, typer.Option(help="The change that matters, in percent.")] = 2.0,
    json: Json = False,
) -> None:
    """Say what changed between two results; exit code 1 where something regressed, 3 unclear."""
    from ridgeline.cli.commands.compare import command

    _end(command(a, b, threshold / 100, json))


add_plan_commands(app)
add_terminal_commands(app)
models.add_to(app)
explain.add_to(app)
diagnose.add_to(app)
look_first(app)
