"""`ridgeline serve`: an engine behind the OpenAI API until a signal comes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ridgeline.cli.flags import refuse
from ridgeline.records import EngineInfo
from ridgeline.serve.run import ServerOptions, listen, options_from, run, url_of
from ridgeline.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ridgeline.engine.engine import Engine


def command(settings: Settings, table: dict[str, Any], flags: dict[str, Any]) -> int:
    """Serve until SIGINT or SIGTERM; `flags` override the file's `[server]` table."""
    options = options_from(table, flags)
    console = Console(stderr=True, highlight=False)
    with listen(options) as listener:
        from ridgeline.engine.engine import Engine  # slow to import: after what may be refused
        from ridgeline.serve.app import create_app, name_of

        console.print(f"loading {settings.model} …", style="dim", markup=False)
        engine = Engine.from_settings(settings)
        try:
            app = create_app(
                engine, served_model_name=options.served_model_name, api_key=options.api_key
            )
            _attach_batches(app, engine, options)
            name = options.served_model_name or name_of(engine.info.model)
            lines = [*summary(engine.info), f"{name} is served at {url_of(listener)}/v1"]
            run(app, listener, options, ready=lambda: _print(console, lines))
        finally:
            engine.close()
    return 0


def _attach_batches(app: FastAPI, engine: Engine, options: ServerOptions) -> None:
    """The Batch API, where a store was named for it."""
    if options.batch_store is None:
        refuse(["--batch-window"] if options.batch_window else [], "without --batch-store")
        return
    from ridgeline.serve.app import create_app
    from ridgeline.serve.batches.attach import BatchOptions, attach
    from ridgeline.serve.batches.background import background
    from ridgeline.serve.batches.worker import Window

    line_app = create_app(background(engine), served_model_name=options.served_model_name)
    window = None if options.batch_window is None else Window.parse(options.batch_window)
    settings = BatchOptions(
        store=Path(options.batch_store), most=engine.resolved.max_num_seqs, window=window
    )
    attach(app, line_app, settings, app.state.metrics.registry)


def summary(info: EngineInfo) -> list[str]:
    """What was resolved, in two lines."""
    capacity = info.num_blocks * info.block_size
    kv_mib = capacity * info.kv_bytes_per_token / 2**20
    return [
        f"{info.device} · {info.compute_dtype} · weights {info.weight_bytes / 2**20:,.1f} MiB",
        f"KV cache {kv_mib:,.1f} MiB = {capacity:,} tokens · context {info.max_model_len:,}",
    ]


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
