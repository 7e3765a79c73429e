"""What a simulated server serves: engines with a hash for a model, and adapters that change it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.engine.adapters.products import StepAdapters
from ridgeline.engine.adapters.registry import AdapterInfo, AdapterRegistry
from ridgeline.engine.engine import Engine
from ridgeline.records import Event, Token
from ridgeline.serve.service import Service
from tests.simulation.model import HashRunner, root_of

OTHER_MODEL, OTHER_SALT = "other", 77


class SimulatedAdapters(AdapterRegistry):
    """The real registry, but for the weights: a directory is the number of a version."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters, self._lock, self._step = max_adapters, threading.Lock(), StepAdapters()
        self._places, self._stack = {}, None
        self._by_name: dict[str, AdapterInfo] = {}
        self._by_id: dict[int, Any] = {}

    def load(self, name: str, directory: str) -> AdapterInfo:
        with self._lock:
            self._check_new(name)
            info = AdapterInfo(name, int(directory), 1)
            self._by_id[info.id], self._by_name[name] = info, info
        return info

    def _index(self, rows: list[int], num_rows: int) -> torch.Tensor | None:
        return None


@dataclass
class AdapterVersion:
    """Weights that were loaded under a name, at most from `loaded_s` to `unloaded_s`."""

    name: str
    id: int
    loaded_s: float
    unloaded_s: float | None = None


class AdapterBook:
    """Which version a request may have met, as far as operators can know."""

    def __init__(self) -> None:
        self.versions: list[AdapterVersion] = []

    def begin(self, name: str, now_s: float) -> AdapterVersion:
        """A version that is about to be loaded."""
        version = AdapterVersion(name, 1000 + len(self.versions), now_s)
        self.versions.append(version)
        return version

    @property
    def names(self) -> list[str]:
        return sorted({version.name for version in self.versions})

    def roots_since(self, name: str, began_s: float) -> list[int]:
        """Of the versions that were loaded at some time since then."""
        return [
            root_of(0, version.id)
            for version in self.versions
            if version.name == name
            and (version.unloaded_s is None or version.unloaded_s >= began_s)
        ]


class CountingEngine:
    """Delegates to an engine, and counts the tokens that reach the server's streams."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.num_tokens, self.num_submitted = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_adapter(self, name: str, directory: str) -> AdapterInfo:
        return self._engine.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        self._engine.unload_adapter(name)

    async def listen(self, prompt: Any, sampling: Any, sink: Any, **options: Any) -> Any:
        def counted(events: Sequence[Event]) -> None:
            self.num_tokens += sum(isinstance(event, Token) for event in events)
            sink(events)

        leave = await self._engine.listen(prompt, sampling, counted, **options)
        self.num_submitted += 1
        return leave


class SimulatedModel:
    """One served model: its engine, the runner in it, and its part of the server."""

    def __init__(self, engine: Engine, runner: HashRunner, setup: Any) -> None:
        self.engine, self.runner, self.setup = engine, runner, setup
        self.counting = CountingEngine(engine)
        runner.find_sequence = engine._loop.scheduler._registry.find_running
        self.service: Service  # once the app is there
        self.orphans: dict[str, int] = {}  # requests without a listener, and for how many steps

    @property
    def scheduler(self) -> Any:
        return self.engine._loop.scheduler

    @property
    def running(self) -> Any:
        """As the invariants of `tests.invariants.checks` read it."""
        return self.scheduler.running

    def watch_steps(self, check: Callable[[SimulatedModel], None]) -> None:
        """Call `check` after every step, on the engine's thread."""
        engine_loop = self.engine._loop
        original = engine_loop.step

        def step() -> None:
            original()
            check(self)

        engine_loop.step = step  # type: ignore[method-assign]
