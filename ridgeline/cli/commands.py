"""Every subcommand's flags. Bodies import what they need when they run, so that --help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.flags import EngineFlags, takes_engine_flags

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
    from ridgeline.cli.doctor import command

    _end(command(json, refresh))


@app.command()
def inspect(model: Model, json: Json = False) -> None:
    """Print a model's arithmetic: parameters, FLOPs and bytes per token, KV cache."""
    from ridgeline.cli.inspect import command

    _end(command(model, json))


@app.command()
@takes_engine_flags
def serve(
    model: AnyModel = None,
    host: Annotated[str | None, typer.Option(help="Address (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes any (default: 8000).")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for (default: the model's).")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_API_KEY", help="Key that clients must send.")
    ] = None,
    shutdown_timeout_s: Annotated[
        int | None, typer.Option(help="Longest wait for running answers (default: 30).")
    ] = None,
    log_requests: Annotated[
        bool | None, typer.Option("--log-requests", help="Log every request.")
    ] = None,
    *,
    engine: EngineFlags,
) -> None:
    """Serve a model over the OpenAI API."""
    from ridgeline.cli.serve import command

    flags = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "api_key": api_key,
        "shutdown_timeout_s": shutdown_timeout_s,
        "log_requests": log_requests,
    }
    _end(command(*engine.resolve(model), flags))


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
    from ridgeline.cli.generate import command
    from ridgeline.records import Sampling

    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop or ())
    )
    _end(command(engine.settings(model), prompt, sampling, chat=chat))
