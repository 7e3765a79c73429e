"""`ridgeline serve`: an engine behind the OpenAI API until a signal comes."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console

from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.validate.output_paths import check_file
from ridgeline.config.server import ServeModel, ServerOptions
from ridgeline.config.settings import Settings
from ridgeline.config.tools import NewKeyOptions
from ridgeline.hardware.probe import cached_machine
from ridgeline.records import EngineInfo
from ridgeline.roofline import Peaks
from ridgeline.serve.auth.keys import load_keys
from ridgeline.serve.auth.keys import new_key as make_key
from ridgeline.serve.config import batch_app_options
from ridgeline.serve.server import AdminListener, check_exposed, listen, run, url_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ridgeline.engine.engine import Engine
    from ridgeline.serve.batch.worker import DailyWindow


def serve(call: Invocation) -> int:
    """`ridgeline serve`."""
    return command(call.settings(call.read(ServeModel).model), call.read(ServerOptions))


def new_key(call: Invocation) -> None:
    """`ridgeline new-key`: print a new key, and the entry of the keys file that accepts it."""
    key, entry = make_key(call.read(NewKeyOptions).name)
    print(f"{key}\n\n{entry}")


def command(settings: Settings, options: ServerOptions) -> int:
    """Serve until SIGINT or SIGTERM."""
    check_exposed(options)
    load_keys(options.api_key, options.api_keys_file)  # a bad file is refused before a model loads
    _check_batches(options)
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(listen(options))
        admin_listener = _listen_for_admin(options, held)
        from ridgeline.engine.engine import Engine  # slow to import: after what may be refused
        from ridgeline.serve.app import create_admin_app, create_app

        console.print(f"loading {settings.model} …", style="dim", markup=False)
        engine = Engine.from_settings(settings)
        held.callback(engine.close)
        app = create_app(engine, options, peaks=_peaks(settings))
        _attach_batches(app, engine, options)
        service = app.state.service
        lines = [*summary(engine.info), f"{service.name} is served at {url_of(listener)}/v1"]
        admin = None
        if admin_listener is not None:
            admin = AdminListener(create_admin_app(service), admin_listener)
            lines.append(f"operators: {url_of(admin_listener)}/admin/state")
        run(app, listener, options, on_ready=lambda: _print(console, lines), admin=admin)
    return 0


def _peaks(settings: Settings) -> Peaks | None:
    """What `ridgeline doctor` last measured here; a server does not wait to measure."""
    machine = cached_machine()
    if machine is None:
        return None
    from ridgeline.workflows.configuration_costs import ConfigurationCosts

    return ConfigurationCosts(machine).peaks(settings)


def _listen_for_admin(options: ServerOptions, held: contextlib.ExitStack) -> socket.socket | None:
    if options.admin_port is None:
        return None
    return held.enter_context(listen(replace(options, host="127.0.0.1", port=options.admin_port)))


def _check_batches(options: ServerOptions) -> None:
    """BadInput where the Batch API's flags are wrong: before a model loads."""
    if options.batch_store is None:
        return
    check_file(Path(options.batch_store), "--batch-store")
    _window(options)


def _window(options: ServerOptions) -> DailyWindow | None:
    from ridgeline.serve.batch.worker import DailyWindow

    return None if options.batch_window is None else DailyWindow.parse(options.batch_window)


def _attach_batches(app: FastAPI, engine: Engine, options: ServerOptions) -> None:
    """The Batch API, where a store was named for it."""
    if options.batch_store is None:
        return
    from ridgeline.serve.app import create_app
    from ridgeline.serve.batch.attach import BatchOptions, attach_batches
    from ridgeline.serve.batch.executor import background_engine

    batch_app = create_app(background_engine(engine), batch_app_options(options))
    limit = options.batch_store_max_bytes
    settings = BatchOptions(
        store=Path(options.batch_store),
        max_concurrency=engine.resolved.max_num_seqs,
        window=_window(options),
        **({"max_bytes": limit} if limit is not None else {}),
    )
    attach_batches(app, batch_app, settings)


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
