"""What the search needs from outside: running configurations, a simulator, facts and prices.

The search knows no engine and no clock. A `Deployment` is one configuration that is up; an
`Environment` opens deployments and holds what the model spec, the hardware probe and the simulator
know. `ridgeline.workflows.optimize` builds one around the engine or around an external server; the
tests build one on a virtual clock.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import numpy as np

from ridgeline.config.settings import Settings
from ridgeline.diagnose.conditions import Value
from ridgeline.errors import CannotRun
from ridgeline.measure.client.load_client import LoadOptions, OnFinish
from ridgeline.measure.workload.arrivals import RecordedArrivals
from ridgeline.optimize.quality.recall import RecallSource, RecallTexts
from ridgeline.optimize.quality.served_text import TextSource
from ridgeline.optimize.quality.task_questions import Task, TextQuestion
from ridgeline.optimize.quality.text_comparison import Array
from ridgeline.records import EngineInfo, RequestTrace, RunTrace, StepStat
from ridgeline.records.traffic import TrafficProfile
from ridgeline.roofline import Peaks, PriceStep


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `rate` requests/s offered for `window_s`, then up to `grace_s` for requests still in
    flight.

    The same seed gives the same prompts and, up to a factor of the rate, the same arrival gaps.
    """

    rate: float
    seed: int
    window_s: float
    grace_s: float

    def poisson(self) -> tuple[RecordedArrivals, LoadOptions]:
        """The arrival process of this load and the client options that run it."""
        dues = arrival_times_s(self)
        options = LoadOptions(num_requests=len(dues), grace_s=self.grace_s, seed=self.seed)
        return RecordedArrivals(at_s=dues, label=self._arrivals, rate=self.rate), options

    def simulated(
        self,
        duration_s: float,
        requests: tuple[RequestTrace, ...],
        steps: tuple[StepStat, ...] = (),
    ) -> RunTrace:
        """The trace of a simulated run of this load."""
        return RunTrace(
            target="simulated",
            workload="simulated",
            arrivals=self._arrivals,
            seed=self.seed,
            started_unix_s=0.0,
            duration_s=max(duration_s, self.window_s),
            requests=requests,
            steps=steps,
        )

    @property
    def _arrivals(self) -> str:
        return f"poisson:{self.rate!r}"


def arrival_times_s(load: Load) -> tuple[float, ...]:
    """Arrival times of one run: a Poisson process conditioned on its number of arrivals.

    The count is exactly rate × window, and given the count, Poisson arrivals are uniform. In a
    short run the random number of arrivals would otherwise hide the differences that the search
    looks for.
    """
    rng = random.Random(f"{load.seed}/arrivals")
    count = max(1, round(load.rate * load.window_s))
    return tuple(sorted(rng.uniform(0.0, load.window_s) for _ in range(count)))


class Deployment(Protocol):
    """One configuration that is up and ready to receive load."""

    @property
    def info(self) -> EngineInfo: ...

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        """Measure one run; returns shortly after window_s + grace_s at the latest.

        `on_finish` is called for every finished request; a reason returned by it ends the run
        early.
        """
        ...

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Greedy continuations of all prompts, sent together so that they share batches."""
        ...

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        """Nats between the two most likely tokens at position `place` of an `output` returned by
        `greedy`.
        """
        ...

    def margin_variation(self) -> float:
        """Largest change of a margin, in nats, between two answers of this deployment to one
        prompt: 0 where it reproduces itself.
        """
        ...

    def logprobs_of(self, tokens: Sequence[int]) -> Array:
        """Log-softmax after each of the T tokens, as an array [T, V]."""
        ...


def top_two_margin(logprobs_TV: Array) -> float:
    """Nats between the two most likely tokens after the last position."""
    last = np.sort(np.asarray(logprobs_TV)[-1])
    return float(last[-1] - last[-2])


class Simulator(Protocol):
    """The engine's own scheduler on a virtual clock, with step times learnt from measured steps."""

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        """Fit the step times to measured steps of a configuration."""
        ...

    def run(self, settings: Settings, load: Load) -> RunTrace:
        """Simulate a run under this load. Raises UserError if the settings cannot run."""
        ...


class NextSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Commands printed at the end of a result; {model}, {workload} and {slo} are substituted.

    `folder`: of the search's state, where the same command can continue it; "" where it cannot.
    """

    serve: str = "ridgeline serve --config ridgeline.toml"
    optimize: str = "ridgeline optimize --config ridgeline.toml --workload {workload} --slo {slo}"
    bench: str = "ridgeline bench --config ridgeline.toml --workload {workload} --slo {slo}"
    folder: str = ""


def recorded_steps(run: RunTrace, settings: Settings) -> Sequence[StepStat]:
    """The steps that the engine itself recorded."""
    return run.steps


MakeWeights = Callable[[Settings, str, float], Settings]


def cannot_make_weights(settings: Settings, method: str, allowed_s: float) -> Settings:
    """The `make` of an environment that cannot quantise weights: always raises CannotRun."""
    raise CannotRun("weights cannot be made here", value=method)


class ServedTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out texts and questions for servers whose quality is read over HTTP, as text.

    `source_of`: the server of a deployment; None if it takes token ids and scores them, so that
    `Environment.heldout` serves.
    """

    texts: tuple[str, ...]
    questions: tuple[TextQuestion, ...]
    source_of: Callable[[Deployment], TextSource | None]


class ContextSource(TextSource, RecallSource, Protocol):
    """A configuration that is asked about long contexts, and answers through its KV cache."""


class LongContexts(msgspec.Struct, frozen=True, kw_only=True):
    """What rungs that change the KV cache are judged by.

    `texts`: long held-out texts to continue. `recall`: questions about facts in long contexts.
    """

    texts: tuple[str, ...]
    recall: RecallTexts
    source_of: Callable[[Deployment], ContextSource]


class UserEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The user's own evaluation of a deployment: its score, which may drop by `margin`."""

    run: Callable[[Deployment], Awaitable[float | None]]
    margin: float = 0.0


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the search receives from outside.

    `facts`: named numbers about machine, model and workload that rungs may require. `heldout`:
    windows of held-out text for the quality panel (empty if full distributions cannot be read).
    `tasks`: its questions. `served`: the same as text, for servers. `evaluation`: the user's own
    gate. Without any of these lossy rungs are left out. `long_contexts`: what a change of the KV
    cache is judged by; rungs that need it cannot run without it. `traffic`: the shape of the
    workload. `check_prompts`: prompts of the exactness check. `longest_output`: the most tokens
    that one request of the workload generates.
    `steps_of`: the steps the simulator learns from a run.
    `near_tie`: nats between two tokens below which rounding may swap them. `make`: quantises
    weights by a method within a time limit in seconds and returns settings that open them; raises
    CannotRun if the time is too short.
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
    start_description: str = "opening the model with the given settings"
    steps_of: Callable[[RunTrace, Settings], Sequence[StepStat]] = recorded_steps
    near_tie: float = 1e-3
    next_steps: NextSteps = NextSteps()
    tasks: tuple[Task, ...] = ()
    make: MakeWeights = cannot_make_weights
    served: ServedTexts | None = None
    long_contexts: LongContexts | None = None
    evaluation: UserEvaluation | None = None
    traffic: TrafficProfile | None = None

    @property
    def judges_quality(self) -> bool:
        """Whether a lossy rung can be judged."""
        return bool(self.heldout) or self.served is not None or self.evaluation is not None
