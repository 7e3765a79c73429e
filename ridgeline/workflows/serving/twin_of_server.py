"""Serve a twin of another server: its flags, its start-up time, its metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ridgeline.config.server import ServerOptions, TwinServerOptions
from ridgeline.records.progress import Message, Observer, silent
from ridgeline.serve.server import check_exposed, listen, run, url_of
from ridgeline.twin.config import parse_devices
from ridgeline.twin.servers.command_line import ServerKind, ServerLine, document, read_command
from ridgeline.twin.servers.refusal import CommandRefused

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ridgeline.serve.metrics.registry import Metrics
    from ridgeline.twin.build import TwinModel
    from ridgeline.twin.replicated_engine import ReplicatedEngine

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""A twin is only served to this machine."""

COMPLETION_PATHS = ("/v1/completions", "/tokenize", "/detokenize")
"""Routes that a server which only chats does not have."""


def run_twin(options: TwinServerOptions, *, observer: Observer = silent) -> int:
    """Imitate the server that a command line starts, until SIGINT or SIGTERM.

    Waits as long as the server would take to start. Returns the exit code: that of the server if it
    would not understand its command line, whose message is reported. Raises BadInput, DoesNotFit or
    CannotRun where it would refuse to start for another reason, and for what no twin imitates.
    """
    try:
        kind, line = read_command(options.command)
        if line.unrecognized and not options.ignore_unknown_flags:
            observer(Message(text=_version_hint(kind)))
            raise kind.refuse(line)
    except CommandRefused as refused:
        observer(Message(text=refused.log))
        return refused.exit_code
    _serve(kind, line, options, observer)
    return 0


def _serve(
    kind: ServerKind, line: ServerLine, options: TwinServerOptions, observer: Observer
) -> None:
    from ridgeline.twin.servers.behaviour import compiles, startup_s
    from ridgeline.twin.servers.kernel_cache import kernel_file, note_compiled

    with contextlib.ExitStack() as resources:
        server_options = ServerOptions(
            host=LOOPBACK.get(line.host, line.host),
            port=line.port,
            served_model_name=line.served_model_name or line.model,
            api_key=line.api_key,
        )
        check_exposed(server_options)
        app, engine, model = open_twin(kind, line, options, server_options)
        kernels = kernel_file(line) if compiles(line) else None
        finds_kernels = kernels is not None and kernels.exists()
        start_s = startup_s(line, model, finds_kernels=finds_kernels)
        resources.callback(engine.close)
        for text in _opening_lines(kind, line, model, start_s, engine):
            observer(Message(text=text))
        time.sleep(start_s / options.speed)
        note_compiled(kernels)
        listener = resources.enter_context(listen(server_options))

        def announce() -> None:
            observer(Message(text=f"the twin answers at {url_of(listener)}/v1"))

        run(app, listener, server_options, on_ready=announce)


def open_twin(
    kind: ServerKind, line: ServerLine, options: TwinServerOptions, server_options: ServerOptions
) -> tuple[FastAPI, ReplicatedEngine, TwinModel]:
    """The app with the server's pages, its engine, and what its configuration comes to."""
    from ridgeline.serve.app import include_protected
    from ridgeline.twin.build import plan_twin
    from ridgeline.twin.servers.behaviour import TwinRun, twin_of
    from ridgeline.twin.servers.pages import rename_metrics
    from ridgeline.workflows.serving.twin_dialects import ROUTERS
    from ridgeline.workflows.serving.twin_server import create_twin_app

    device, count = parse_devices(options.device)
    run_options = TwinRun(
        device=device,
        num_devices=count,
        speed=options.speed,
        acceptance=options.acceptance,
        drafter_acceptance=options.drafter_acceptance,
    )
    config = twin_of(line, run_options)
    model = plan_twin(config)

    def pages_of(metrics: Metrics) -> dict[str, Callable[[], bytes]]:
        def render() -> bytes:
            return rename_metrics(metrics.render().decode(), kind.metrics).encode()

        documents = {path: partial(document, kind, line, path) for path in kind.pages}
        return {"/metrics": render, "/prometheus/metrics": render, **documents}

    hidden = COMPLETION_PATHS if options.chat_only else ()
    app, engine = create_twin_app(
        config, server_options, model=model, pages_of=pages_of, hidden=hidden
    )
    for router in () if options.chat_only else ROUTERS.get(kind.name, ()):
        include_protected(app, router)
    return app, engine, model


def _version_hint(kind: ServerKind) -> str:
    return (
        f"the twin takes the flags of {kind.name} {kind.table.version}; to ignore those of another "
        "version: ridgeline twin --ignore-unknown-flags …"
    )


def _opening_lines(
    kind: ServerKind, line: ServerLine, model: TwinModel, start_s: float, engine: ReplicatedEngine
) -> list[str]:
    info = engine.info
    tokens = info.kv_tokens
    lines = [
        f"{line.server}: {info.device}",
        f"KV cache {tokens:,} tokens per replica · context {info.max_model_len:,}",
        f"starting takes {start_s:.0f} modelled seconds",
    ]
    if model.offload_bytes:
        lines.append(f"host memory for evicted blocks: {model.offload_bytes / 1e9:.1f} GB")
    if line.unknown:
        lines.append(f"without an effect on the twin: {', '.join(line.unknown)}")
    if line.unrecognized:
        words = " ".join(line.unrecognized)
        lines.append(
            f"ignored, since {kind.name} {kind.table.version} takes no such words: {words}"
        )
    return lines
