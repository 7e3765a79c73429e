"""The real server and the real engine in a simulation: only the model, time and the wire are not.

FastAPI's routes are built once per process and shared by all servers; everything else is new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import uvicorn
from fastapi import FastAPI

from ridgeline.config.server import ServerOptions
from ridgeline.config.settings import settings_from
from ridgeline.engine import engine_loop
from ridgeline.engine.build import EngineParts, make_scheduler
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization.chat import JinjaTemplate
from ridgeline.engine.tokenization.template_process.client import ProcessTemplate
from ridgeline.engine.tokenization.tokenizer import HfTokenizer, load_tokenizer
from ridgeline.serve import server as server_module
from ridgeline.serve.app import add_model, build_routes, create_app
from ridgeline.serve.batch.attach import BatchOptions, attach_batches
from ridgeline.serve.batch.executor import background_engine
from ridgeline.serve.batch.worker import BatchWorker
from ridgeline.serve.server import GracefulServer, uvicorn_config
from tests.simulation.model import Faults, HashRunner, NoMasks, Vocabulary
from tests.simulation.models import (
    OTHER_MODEL,
    OTHER_SALT,
    AdapterBook,
    SimulatedAdapters,
    SimulatedModel,
)
from tests.simulation.renderers import Renderers
from tests.simulation.virtual_time import VirtualLoop, VirtualThreads

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@dataclass(frozen=True)
class Setup:
    """The settings of one server."""

    num_blocks: int = 24
    block_size: int = 8
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    chunked: bool = True
    prefix: bool = True
    max_num_queued_reqs: int = 16
    max_num_queued_tokens: int = 2048
    options: ServerOptions = field(default_factory=ServerOptions)
    faults: Faults = field(default_factory=Faults)
    switches: float = 0.2
    store: Path | None = None
    renderer_faults: float | None = None
    """Of processes that render chats; None: chats are rendered in this process."""
    max_adapters: int = 0
    has_other_model: bool = False


KEYS = ("key-of-alice", "key-of-bob", "key-of-carol")
"""The third has a limit on its requests."""
OPERATOR_KEY = "key-of-the-operator"
_FOLDER = tempfile.TemporaryDirectory(prefix="ridgeline-simulation-")


@cache
def keys_file() -> str:
    """A file of `KEYS` and the operator's."""
    entries = [
        f'[[keys]]\nname = "{key}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{limit}\n'
        for key, limit in (
            *zip(KEYS, ("", "share = 3.0", "requests_per_minute = 4"), strict=True),
            (OPERATOR_KEY, "admin = true"),
        )
    ]
    path = Path(_FOLDER.name) / "keys.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    return str(path)


@cache
def demo() -> tuple[ResolvedSettings, HfTokenizer, Vocabulary]:
    """The demo model's settings and tokenizer, and the tokens that the simulated model writes."""
    resolved = resolve(settings_from({"model": "demo"}))
    loaded = load_tokenizer(resolved.model)
    assert isinstance(loaded, HfTokenizer)
    tokenizer = HfTokenizer(loaded.inner, JinjaTemplate({"default": TEMPLATE}, {}))
    eos = next(iter(resolved.spec.eos_token_ids))
    texts = {}
    for token in range(1, 400):
        text = tokenizer.bytes_of(token)
        if text and text.isascii() and text.decode().isprintable():
            texts[token] = text.decode()
    texts.pop(eos, None)
    return resolved, tokenizer, Vocabulary(texts, eos)


@cache
def _built_routes(has_batches: bool, has_adapters: bool) -> list[Any]:
    resolved, tokenizer, _ = demo()
    engine = mock.Mock(tokenizer=tokenizer)
    options = ServerOptions(allow_runtime_lora_updating=has_adapters)
    app = create_app(_Shell(engine, resolved), options)  # type: ignore[arg-type]
    if has_batches:
        from ridgeline.serve.app import include_protected
        from ridgeline.serve.batch.routes import router

        include_protected(app, router)
    build_routes(app)
    return list(app.router.routes)


class _Shell:
    """An engine of which only the description is read."""

    def __init__(self, engine: Any, resolved: ResolvedSettings) -> None:
        self.tokenizer, self.resolved = engine.tokenizer, resolved
        self.info = mock.Mock(model="demo", settings={})


class SimulatedServer:
    """An engine, an app and a uvicorn server on a virtual loop."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, setup: Setup) -> None:
        self.loop, self.setup, self.wall_s = loop, setup, 1_700_000_000.0
        self.logged: list[str] = []
        self.threads = VirtualThreads(loop, rng, setup.switches)
        fault = setup.renderer_faults or 0.0
        num_models = 1 + setup.has_other_model
        self.renderers = Renderers(loop, random.Random(rng.random()), fault, num_models)
        self.adapters = AdapterBook()
        self.models = [self._open_model(rng)]
        self.app = self._app(self.models[0].counting, setup.options)
        self.service = self.models[0].service = self.app.state.service
        if setup.max_adapters:
            first = self.adapters.begin("tuned", loop.now_s)
            self.engine.load_adapter(first.name, str(first.id))
        if setup.has_other_model:
            self._add_model(self._open_model(rng, OTHER_MODEL, OTHER_SALT))
        self.worker = None if setup.store is None else self._attach_batches(setup.store)
        config = uvicorn_config(self.app, setup.options)
        self.server = _Server(config, self.service)

    @property
    def engine(self) -> Engine:
        """The first model's."""
        return self.models[0].engine

    def close(self) -> None:
        for model in self.models:
            model.engine.close()

    def clock(self) -> float:
        self.threads.switch()
        return self.loop.now_s

    def wall_clock(self) -> float:
        """The time of day, which a test may set."""
        return self.wall_s + self.loop.now_s

    async def serve(self) -> None:
        """Serve until the server has drained."""
        await self.server.serve(sockets=[mock.Mock()])

    def drain(self) -> None:
        self.server.handle_exit(15, None)

    def _open_model(
        self, rng: random.Random, name: str | None = None, salt: int = 0
    ) -> SimulatedModel:
        """The first model has the adapters."""
        resolved, tokenizer, vocabulary = demo()
        setup = self.setup
        if setup.renderer_faults is not None:
            tokenizer = HfTokenizer(tokenizer.inner, ProcessTemplate({"default": TEMPLATE}, {}))
        resolved = msgspec.structs.replace(
            resolved,
            model=name or resolved.model,
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.num_blocks * setup.block_size,
            enable_chunked_prefill=setup.chunked,
            enable_prefix_caching=setup.prefix,
            max_num_queued_reqs=setup.max_num_queued_reqs,
            max_num_queued_tokens=setup.max_num_queued_tokens,
        )
        has_adapters = setup.max_adapters > 0 and not salt
        adapters = SimulatedAdapters(setup.max_adapters) if has_adapters else None
        runner = HashRunner(
            vocabulary,
            setup.num_blocks,
            setup.block_size,
            sleep=self.threads.sleep,
            rng=rng,
            faults=setup.faults,
            salt=salt,
            adapters=adapters,
        )
        parts = EngineParts(
            tokenizer,
            make_scheduler(resolved),
            runner,  # type: ignore[arg-type]
            NoMasks(),  # type: ignore[arg-type]
            0,
            adapters=adapters,
        )
        with mock.patch.object(engine_loop, "threading", self.threads):
            engine = Engine(resolved, parts, clock=self.clock)
        return SimulatedModel(engine, runner, setup)

    def _add_model(self, model: SimulatedModel) -> None:
        model.service = add_model(self.app, model.counting, self.setup.options)  # type: ignore[arg-type]
        self._set_clock(model.service)
        self.models.append(model)

    def _app(self, engine: Any, options: ServerOptions) -> FastAPI:
        app = create_app(engine, options)
        app.router.routes = self._routes()
        self._set_clock(app.state.service)
        return app

    def _routes(self) -> list[Any]:
        return _built_routes(self.setup.store is not None, self.setup.max_adapters > 0)

    def _set_clock(self, service: Any) -> None:
        service.now = service.metrics.now = service.drain._now = self.loop.time

    def _attach_batches(self, path: Path) -> BatchWorker:
        batch_app = self._app(background_engine(self.models[0].counting), ServerOptions())  # type: ignore[arg-type]
        options = BatchOptions(store=path, max_concurrency=3, poll_s=1.0)
        worker = attach_batches(self.app, batch_app, options)
        self.app.router.routes = self._routes()
        worker._clock, worker._timer = self.wall_clock, self.loop.time
        worker._store._clock = worker._store.files._clock = self.wall_clock
        batches = self.app.state.batches
        self.app.state.batches = dataclasses.replace(batches, clock=self.wall_clock)
        return worker


class _Server(GracefulServer):
    """Takes no signals of this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LogWatcher(logging.Handler):
    """Collects errors that a server logs, apart from those of steps that were made to fail."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("ridgeline.engine"):
            error = record.exc_info[1] if record.exc_info else None
            self.lines.append(f"{record.name}: {record.getMessage()} {error!r}")


@contextlib.contextmanager
def watched_logs() -> Iterator[LogWatcher]:
    """Errors go to the watcher and nowhere else."""
    watcher = LogWatcher()
    names = ("uvicorn.error", "uvicorn", "ridgeline", "asyncio")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [watcher], False
    try:
        with (
            mock.patch.object(server_module, "gc", mock.Mock()),
            mock.patch.object(uvicorn.Config, "configure_logging"),
        ):
            yield watcher
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
