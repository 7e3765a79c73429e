"""What the loop needs of a configuration that is up, and of the place where it opens one.

The loop knows no engine. `Deployment` is one configuration being served; `Environment` opens them and holds
what the spec, the probe and the simulator know. The command line builds a Lab around the real
engine (`ridgeline.cli.commands.optimize`); a test builds one on a virtual clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import numpy as np

from ridgeline.config.settings import NAIVE, Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.errors import CannotRun
from ridgeline.measure.arrivals import Instants
from ridgeline.measure.client import LoadOptions, OnFinish
from ridgeline.optimize.quality.task_questions import Task
from ridgeline.optimize.quality.text_comparison import Array
from ridgeline.records import EngineInfo, RunTrace, StepStat
from ridgeline.roofline import Peaks, PriceStep


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `rate` requests/s for `window_s`, then up to `grace_s` for what is still in flight.

    Equal seeds are equal prompts, and equal gaps up to the rate.
    """

    rate: float
    seed: int
    window_s: float
    grace_s: float

    def poisson(self) -> tuple[Instants, LoadOptions]:
        """Its arrivals, and how a client runs them."""
        dues = arrival_times_s(self)
        options = LoadOptions(num_requests=len(dues), grace_s=self.grace_s, seed=self.seed)
        return Instants(at_s=dues, label=f"poisson:{self.rate!r}", rate=self.rate), options


def arrival_times_s(load: Load) -> tuple[float, ...]:
    """When the requests of a run are due: a Poisson process, given how many arrive in its window.

    The number is rate x window exactly, and given the number, Poisson arrivals are uniform. In a
    short run the luck of how many arrive would otherwise drown every difference worth finding.
    """
    rng = random.Random(f"{load.seed}/arrivals")
    count = max(1, round(load.rate * load.window_s))
    return tuple(sorted(rng.uniform(0.0, load.window_s) for _ in range(count)))


class Deployment(Protocol):
    """One configuration, up and ready to be loaded."""

    @property
    def info(self) -> EngineInfo: ...

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        """Measure one run; returns at most a moment after window_s + grace_s.

        `on_finish` sees every request as it ends; a reason from it may end the run early.
        """
        ...

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Greedy continuations, all prompts at once (so that they share batches)."""
        ...

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        """Nats between the two most likely tokens at `place` of an `output` that `greedy` gave."""
        ...

    def logprobs_of(self, tokens: Sequence[int]) -> Array:
        """[T, V] log-softmax after each position of `tokens`."""
        ...


def top_two_margin(logprobs_TV: Array) -> float:
    """Nats between the two most likely tokens after the last position."""
    last = np.sort(np.asarray(logprobs_TV)[-1])
    return float(last[-1] - last[-2])


class Simulator(Protocol):
    """The simulator: the engine's own scheduler on a virtual clock, its step times learnt."""

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Take in measured steps of a configuration."""
        ...

    def run(self, settings: Settings, load: Load) -> RunTrace:
        """What a run under this load would give. Raises UserError where settings cannot run."""
        ...


class NextSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The commands that a result ends with; {model} and {workload} are filled in."""

    serve: str = "ridgeline serve --config ridgeline.toml"
    optimize: str = "ridgeline optimize {model} --workload {workload}"
    bench: str = "ridgeline bench --config ridgeline.toml --workload {workload}"


def recorded_steps(run: RunTrace, settings: Settings) -> Sequence[StepStat]:
    """The steps that the engine itself recorded."""
    return run.steps


MakeWeights = Callable[[Settings, str, float], Settings]


def cannot_make_weights(settings: Settings, method: str, allowed_s: float) -> Settings:
    """Of a laboratory that cannot make weights."""
    raise CannotRun("weights cannot be made here", value=method)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that comes in from outside.

    `facts` are named numbers of machine, model and workload that rungs may ask for; `heldout` the
    windows of the quality panel (none where distributions cannot be read: no lossy rung is tried
    then), `tasks` its questions, `check_prompts` those of the exactness check; `longest_output` the
    most tokens that one request of the workload asks for; `start` the settings of the baseline;
    `steps_of` what the simulator learns from a run; `near_tie` the nats between two tokens that
    rounding may exchange; `make` writes weights as settings ask for them, by a method and within so
    many seconds, and returns the settings that open them (CannotRun where time is too short).
    """

    open: Callable[[Settings], AbstractContextManager[Deployment]]
    simulator: Simulator
    price_of: Callable[[Settings], PriceStep]
    peaks_of: Callable[[Settings], Peaks | None]
    facts: dict[str, Value]
    heldout: tuple[tuple[int, ...], ...]
    check_prompts: tuple[tuple[int, ...], ...]
    longest_output: int
    vocab_size: int
    start: dict[str, Any] = msgspec.field(default_factory=lambda: dict(NAIVE))
    start_description: str = "opening the model as a naive deployment would"
    steps_of: Callable[[RunTrace, Settings], Sequence[StepStat]] = recorded_steps
    near_tie: float = 1e-3
    next_steps: NextSteps = NextSteps()
    tasks: tuple[Task, ...] = ()
    make: MakeWeights = cannot_make_weights
