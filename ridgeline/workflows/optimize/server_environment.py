"""The laboratory of `ridgeline optimize --url … --restart-cmd …`: somebody else's server.

Its processes are started and ended here, its flags come from `optimize/external/server_flags.toml`,
and the simulator learns step times that were inferred from what the clients saw. The model is
named too, for its tokenizer and its arithmetic; its weights are not loaded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.hardware.machine import Machine
from ridgeline.measure.workload import Workload
from ridgeline.optimize.environment import Deployment, Environment, Load, NextSteps
from ridgeline.optimize.external.inferred_steps import infer_steps
from ridgeline.optimize.external.server_deployment import (
    RunningServer,
    ServerDeployment,
    TokenNumbers,
    check_settings_applied,
    read_settings,
    server_info,
)
from ridgeline.optimize.external.server_flags import ServerFlags
from ridgeline.optimize.external.server_process import ActiveServer, ServerCommand, ServerProcess
from ridgeline.records import RunTrace
from ridgeline.roofline import Peaks
from ridgeline.workflows.optimize.engine_environment import (
    EngineNumbers,
    Tokenised,
    base_facts,
    check_prompts_of,
    sample_of,
    shared_share,
)
from ridgeline.workflows.optimize.simulator import SimulatedEngine

# Servers compute in bf16 and batch as it comes: two tokens nearer than this change places with it.
NEAR_TIE = 0.1


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What --url, --restart-cmd, --server and --served-model-name said, checked."""

    recipe: ServerCommand
    dialect: ServerFlags
    served_model_name: str | None = None

    @property
    def changes(self) -> dict[str, object]:
        """The settings that are in force as the command line stands."""
        return {**self.dialect.defaults, **self.dialect.given(self.recipe.command)}

    def start(self, settings: Settings) -> Settings:
        return settings_from({**msgspec.to_builtins(settings), **self.changes})


def build(
    settings: Settings, workload: Workload, machine: Machine, server: Server, logs: Path
) -> Environment:
    """Everything that the loop needs, for one model on one server."""
    tokenised = Tokenised(workload, load_tokenizer(settings.model))
    numbers = EngineNumbers(machine)
    start = server.start(settings)
    sample = sample_of(tokenised, numbers.resolved(start))
    facts = base_facts(machine, numbers, start, sample)
    fleet = _Fleet(server, start, tokenised, logs)
    return Environment(
        open=fleet.open,
        simulator=_ServerSimulator(
            SimulatedEngine(numbers.costs, numbers.scheduler, tokenised.requests), server, start
        ),
        price_of=numbers.price,
        peaks_of=lambda settings: _from_outside(numbers.peaks(settings)),
        facts={**facts, "server": server.dialect.name},
        heldout=(),
        check_prompts=check_prompts_of(sample),
        longest_output=max(request.max_tokens for request in sample),
        vocab_size=numbers.resolved(start).spec.vocab_size,
        start=server.changes,
        start_description="starting the server as its command line stands",
        steps_of=partial(infer_steps, shared_share=shared_share(sample)),
        near_tie=NEAR_TIE,
        next_steps=NextSteps(
            serve="sh serve.sh",
            optimize="the same `ridgeline optimize` again, with",
            bench=f"ridgeline bench --url {server.recipe.at(8000)} --workload {{workload}}",
        ),
    )


def _from_outside(peaks: Peaks) -> Peaks:
    """This machine's, where the server was started; what stands under them was seen by clients."""
    note = (
        "steps as clients saw them, host and network included; weights as MODEL's files hold them"
    )
    return msgspec.structs.replace(peaks, source=f"{peaks.source}; {note}")


class _ServerSimulator:
    """The simulator, which knows besides what this server has no flag for."""

    def __init__(self, simulated: SimulatedEngine, server: Server, start: Settings) -> None:
        self._simulated, self._server, self._start = simulated, server, start
        self.learn = simulated.learn

    def run(self, settings: Settings, load: Load) -> RunTrace:
        self._server.dialect.words(settings, self._start)
        return self._simulated.run(settings, load)


class _Fleet:
    """Opens configurations: at most the two sides of a comparison at a time."""

    def __init__(self, server: Server, start: Settings, workload: Tokenised, logs: Path) -> None:
        self._server, self._start, self._workload, self._logs = server, start, workload, logs
        self._slot = ActiveServer(server.recipe.side_by_side)
        self._names: TokenNumbers = {}
        self._numbers = count(1)

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Deployment]:
        words = self._server.dialect.words(settings, self._start)
        log = self._logs / f"server-{next(self._numbers)}.log"
        process = ServerProcess(self._server.recipe, words, log)

        def up() -> RunningServer:
            self._slot.activate(process)
            return RunningServer(process.url, process.num_starts)

        try:
            url = up().url
            model = self._server.served_model_name or _first_model(url)
            told = read_settings(url, self._server.dialect.reads)
            check_settings_applied(settings, self._start, told)
            info = server_info(settings, told, model)
            yield ServerDeployment(up, model, self._workload, info, self._names)
        finally:
            self._slot.retire(process)


def _first_model(url: str) -> str:
    import json
    import urllib.request

    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as reply:
        return str(json.load(reply)["data"][0]["id"])


def serve_script(server: Server, settings: Settings, start: Settings) -> str:
    """A shell script that starts the server with the settings that were found."""
    import shlex

    words = server.recipe.words(server.dialect.words(settings, start), 8000)
    return f"#!/bin/sh\nexec {shlex.join(words)}\n"
