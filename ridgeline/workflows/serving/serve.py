"""Serve a model over HTTP until SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ridgeline.config.server import ServerOptions, TwinOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.hardware.probe import cached_machine
from ridgeline.records import EngineInfo
from ridgeline.records.progress import Message, Observer, silent
from ridgeline.report.output_paths import check_file
from ridgeline.report.result import Result
from ridgeline.roofline import Peaks
from ridgeline.serve.auth.keys import load_keys
from ridgeline.serve.auth.keys import new_key as make_key
from ridgeline.serve.config import batch_app_options
from ridgeline.serve.server import AdminListener, check_exposed, listen, listen_at, run, url_of
from ridgeline.serve.telemetry import open_telemetry
from ridgeline.workflows.configuration_costs import ConfigurationCosts
from ridgeline.workflows.models.fetch_models import fetch_models
from ridgeline.workflows.serving.memory_shares import share_memory

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ridgeline.engine.engine import Engine
    from ridgeline.serve.batch.worker import DailyWindow
    from ridgeline.serve.service import Service
    from ridgeline.twin.replicated_engine import ReplicatedEngine


class ServedModel(Result, frozen=True, kw_only=True):
    """A model that is being served.

    `admin_url`: the operators' pages, if they have a port. `needs_key`: whether requests must carry
    an API key.
    """

    name: str
    url: str
    admin_url: str | None
    engine: EngineInfo
    needs_key: bool = False


def _ignore(served: ServedModel, stop: Callable[[], None]) -> None:
    pass


def serve(
    settings: Settings,
    options: ServerOptions,
    *,
    twin: TwinOptions | None = None,
    on_ready: Callable[[ServedModel, Callable[[], None]], None] = _ignore,
    observer: Observer = silent,
) -> ServedModel:
    """Load the model and serve it until SIGINT or SIGTERM; returns what was served.

    With `twin`, a model of the device `settings.device` is served: nothing is loaded.

    `on_ready` is called as soon as requests are accepted, with the served model and a function that
    stops the server from any thread, as SIGTERM does. (Only the main thread gets signals.) Options
    and address are checked before the model is loaded. Raises BadInput, BadModel, CannotRun, or
    EngineUnavailable where an engine has stopped by itself.
    """
    check_exposed(options)
    load_keys(options.api_key, options.api_keys_file)
    if options.batch_store is not None:
        check_file(Path(options.batch_store), "--batch-store")
        _batch_window(options)
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(listen(options))
        admin_listener = _listen_for_admin(options, resources)
        from ridgeline.serve.app import create_admin_app  # imports torch: only after the checks

        first, *others = _all_settings(settings, options, twin, observer)
        app, engine = _open_app(first, options, twin, observer)
        resources.callback(engine.close)
        for own in others:
            resources.callback(_add_model(app, own, options, observer).close)
        _attach_batches(app, engine, options)
        service = app.state.service
        telemetry = open_telemetry(options.otlp_endpoint, options.emf_file, service="ridgeline")
        resources.callback(telemetry.close)
        service.group.export_to(telemetry)
        admin = None
        if admin_listener is not None:
            admin = AdminListener(create_admin_app(service), admin_listener)
        served = ServedModel(
            name=service.name,
            url=url_of(listener),
            admin_url=None if admin_listener is None else url_of(admin_listener),
            engine=engine.info,
            needs_key=bool(service.keys),
        )
        stop = partial(service.drain.start, options.shutdown_timeout_s)
        run(app, listener, options, on_ready=lambda: on_ready(served, stop), admin=admin)
    return served


def serve_node(settings: Settings, observer: Observer = silent) -> None:
    """Compute the ranks of a node other than 0 until node 0 ends.

    Raises BadInput, CannotRun, or RankFailed if a rank of this node fails.
    """
    from ridgeline.engine.parallel.nodes import run_node  # imports torch

    fetch_models(settings, observer)
    where = f"node {settings.node_rank} of {settings.nnodes}"
    observer(Message(text=f"{where}: computing for {settings.master_addr}"))
    run_node(settings)


def _open_app(
    settings: Settings, options: ServerOptions, twin: TwinOptions | None, observer: Observer
) -> tuple[FastAPI, Engine | ReplicatedEngine]:
    """The app over a loaded engine, or over that of a twin."""
    if twin is not None:
        from ridgeline.workflows.serving.twin_server import create_twin_app, twin_config

        if options.semantic_cache_pairs is not None:
            raise BadInput(
                "--semantic-cache-pairs cannot be combined with --twin, which embeds nothing",
                value=options.semantic_cache_pairs,
                fix="leave it out; simulate --semantic-cache-share models its hits",
            )
        return create_twin_app(twin_config(settings, twin), options)
    from ridgeline.serve.app import create_app
    from ridgeline.workflows.open_engine import open_engine

    fetch_models(settings, observer)  # a twin has no weights to download
    observer(Message(text=f"loading {settings.model} …"))
    engine = open_engine(settings, observer)
    try:
        engine.warm_up_grammars()
        app = create_app(engine, options, peaks=_peaks(settings))
    except BaseException:
        engine.close()
        raise
    _report_semantic_cache(app.state.service, observer)
    app.state.service.leases = engine.transfers
    return app, engine


def _all_settings(
    settings: Settings, options: ServerOptions, twin: TwinOptions | None, observer: Observer
) -> list[Settings]:
    """The settings of every model to serve, the first one's first."""
    if not options.further_models:
        return [settings]
    if twin is not None:
        raise BadInput("--model cannot be combined with --twin", fix="start a twin per model")
    # adapters belong to the first model
    other = replace(settings, enable_lora=False, lora_modules=())
    everything = [settings, *(replace(other, model=name) for name in options.further_models)]
    for own in everything:
        fetch_models(own, observer)
    return share_memory(everything)


def _add_model(
    app: FastAPI, settings: Settings, options: ServerOptions, observer: Observer
) -> Engine:
    """Load a further model and serve it under the name of its repository or directory."""
    from ridgeline.serve.app import add_model
    from ridgeline.workflows.open_engine import open_engine

    observer(Message(text=f"loading {settings.model} …"))
    engine = open_engine(settings, observer)
    try:
        engine.warm_up_grammars()
        own = replace(options, served_model_name=None)
        service = add_model(app, engine, own, peaks=_peaks(settings))
        service.leases = engine.transfers
        _report_semantic_cache(service, observer)
    except BaseException:
        engine.close()
        raise
    return engine


def _report_semantic_cache(service: Service, observer: Observer) -> None:
    """Say which answers similar questions share, and how often that was wrong."""
    cache = service.response_cache
    if cache is not None and cache.calibration is not None:
        text = f"semantic cache of {service.name} (lossy): {cache.calibration}"
        observer(Message(text=text))


class NewApiKey(Result, frozen=True, kw_only=True):
    """A new API key, and the entry of the keys file that accepts it (it holds only a hash)."""

    key: str
    entry: str


def new_key(name: str) -> NewApiKey:
    """Create an API key for the owner `name`."""
    key, entry = make_key(name)
    return NewApiKey(key=key, entry=entry)


def _peaks(settings: Settings) -> Peaks | None:
    """The peaks that `ridgeline doctor` last measured; None rather than a delay of the start."""
    machine = cached_machine()
    return None if machine is None else ConfigurationCosts(machine).peaks(settings)


def _listen_for_admin(
    options: ServerOptions, resources: contextlib.ExitStack
) -> socket.socket | None:
    if options.admin_port is None:
        return None
    return resources.enter_context(listen_at("127.0.0.1", options.admin_port, "--admin-port"))


def _batch_window(options: ServerOptions) -> DailyWindow | None:
    from ridgeline.serve.batch.worker import DailyWindow

    return None if options.batch_window is None else DailyWindow.parse(options.batch_window)


def _attach_batches(
    app: FastAPI, engine: Engine | ReplicatedEngine, options: ServerOptions
) -> None:
    """Add the Batch API if a store is configured."""
    if options.batch_store is None:
        return
    from ridgeline.serve.app import create_app
    from ridgeline.serve.batch.attach import BatchOptions, attach_batches
    from ridgeline.serve.batch.executor import background_engine

    batch_app = create_app(background_engine(engine), batch_app_options(options))
    limit = options.batch_store_max_bytes
    settings = BatchOptions(
        store=Path(options.batch_store),
        max_concurrency=int(str(engine.info.settings["max_num_seqs"])),
        window=_batch_window(options),
        **({"max_bytes": limit} if limit is not None else {}),
    )
    attach_batches(app, batch_app, settings)
