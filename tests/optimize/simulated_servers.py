"""A laboratory on a virtual clock: a small queueing model of a server instead of an engine.

Step time = fixed + per sequence + per token; slots, batching, prefix reuse and quantisation follow
the settings. `Quirks` make a candidate noisy, slow, wrong, or dead, so that every verdict can be
provoked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ridgeline.config.settings import Settings, changed
from ridgeline.measure.client.load_client import OnFinish
from ridgeline.optimize.environment import (
    Deployment,
    Environment,
    Load,
    arrival_times_s,
    top_two_margin,
)
from ridgeline.records import EngineInfo, MachineLoad, RequestTrace, RunTrace, StepStat
from ridgeline.roofline import Peaks, Work

VOCAB = 16
NAIVE = {
    "batching": "static",
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
}
"""One request at a time, no reuse: a baseline on which most rungs gain."""


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Physics:
    """What a step costs, and what a request is."""

    fixed_s: float = 0.008
    per_seq_s: float = 0.0006
    per_token_s: float = 0.0001
    prompt: int = 120
    shared: int = 60
    output: int = 24
    int8_speed: float = 1.0  # factor on the whole step with quantization=int8


@dataclass
class Quirks:
    """What is odd about a configuration, decided by its settings."""

    noise: float = 0.01
    speed: float = 1.0
    open_error: Exception | None = None
    run_error: Exception | None = None
    logit_noise: float = 0.0
    wrong_tokens: bool = False


@dataclass
class Fake:
    """Everything a test may turn."""

    physics: Physics = field(default_factory=Physics)
    believed: Physics | None = None  # what the simulator thinks; the truth by default
    quirks: dict[tuple[str, object], Quirks] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    opened: list[Settings] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    interrupt_at_s: float = math.inf
    open_s: float = 0.5
    busy: Callable[[float], float] = lambda now_s: 0.0  # share of the CPU taken at a time

    def quirks_of(self, settings: Settings) -> Quirks:
        for (name, value), quirks in self.quirks.items():
            if getattr(settings, name) == value:
                return quirks
        return Quirks()

    def environment(self) -> Environment:
        return Environment(
            open=self._open,
            simulator=FakeOracle(self.believed or self.physics),
            price_of=lambda settings: _price,
            peaks_of=lambda settings: Peaks(flops_s=1e11, bytes_s=2e10, dtype="float32"),
            facts={"machine_cores": 2, "model_params": 8e6, "shared_prompt_share": 0.5},
            heldout=tuple(tuple((i + j) % VOCAB for j in range(128)) for i in range(160)),
            check_prompts=((1, 2, 3), (4, 5, 6)),
            longest_output=self.physics.output,
            vocab_size=VOCAB,
        )

    @contextmanager
    def _open(self, settings: Settings) -> Iterator[Deployment]:
        quirks = self.quirks_of(settings)
        self.clock.now_s += self.open_s
        if quirks.open_error is not None:
            raise quirks.open_error
        self.opened.append(settings)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield SimulatedDeployment(self, settings, quirks)
        finally:
            self.num_open -= 1


class SimulatedDeployment:
    def __init__(self, fake: Fake, settings: Settings, quirks: Quirks) -> None:
        self._fake, self._settings, self._quirks = fake, settings, quirks

    @property
    def info(self) -> EngineInfo:
        settings = msgspec.structs.asdict(self._settings)
        settings["max_num_seqs"] = settings["max_num_seqs"] or 8
        return EngineInfo(
            model="fake",
            settings=settings,
            derivations={},
            max_model_len=1024,
            num_blocks=1000,
            block_size=16,
            weight_bytes=32_000_000,
            kv_bytes_per_token=1000,
            device="cpu",
            compute_dtype="float32",
        )

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        if self._quirks.run_error is not None:
            raise self._quirks.run_error
        # By what differs from the defaults: a new setting of the engine does not change existing
        # draws.
        rng = random.Random(f"{load.seed}/{changed(self._settings)}")
        speed = self._quirks.speed * math.exp(rng.gauss(0, self._quirks.noise))
        taken = self._fake.busy(self._fake.clock.now_s)
        run = simulate(self._fake.physics, self._settings, load, speed * (1 - taken))
        run = msgspec.structs.replace(run, machine_load=MachineLoad(others_share=taken))
        self._fake.clock.now_s += run.duration_s
        if self._fake.clock.now_s > self._fake.interrupt_at_s:
            raise KeyboardInterrupt
        return run

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        self._fake.clock.now_s += max_tokens * self._fake.physics.fixed_s
        shift = 1 if self._quirks.wrong_tokens else 0
        return [tuple((sum(p) + i + shift) % VOCAB for i in range(max_tokens)) for p in prompts]

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        return top_two_margin(self.logprobs_of((*prompt, *output[:place])))

    def margin_variation(self) -> float:
        return 0.0

    def logprobs_of(self, tokens: Sequence[int]) -> np.ndarray:
        logits = np.zeros((len(tokens), VOCAB))
        logits[np.arange(len(tokens)), (np.asarray(tokens) + 1) % VOCAB] = 3.0
        rng = np.random.default_rng(sum(tokens))
        logits += self._quirks.logit_noise * rng.normal(size=logits.shape)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class FakeOracle:
    def __init__(self, physics: Physics) -> None:
        self._physics = physics
        self.num_learnt = 0

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        self.num_learnt += len(steps)

    def run(self, settings: Settings, load: Load) -> RunTrace:
        return simulate(self._physics, settings, load, 1.0)


def _price(shapes: Sequence[tuple[int, int]], num_sampled: int) -> Work:
    return Work(flops=1.6e7 * sum(new for new, _ in shapes), bytes=3.2e7 + 1000 * len(shapes))


@dataclass
class _Job:
    id: str
    due_s: float
    todo: int
    started_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    cached: int = 0


def simulate(physics: Physics, settings: Settings, load: Load, speed: float) -> RunTrace:
    """One run: Poisson arrivals, then steps until everything is done or the grace is over."""
    if settings.quantization == "int8":
        speed *= physics.int8_speed
    waiting = [
        _Job(f"r{i}", due_s, physics.output) for i, due_s in enumerate(arrival_times_s(load))
    ]
    jobs, running, steps, now_s = list(waiting), [], [], 0.0
    slots = settings.max_num_seqs or 8
    stop_s = load.window_s + load.grace_s
    while (waiting or running) and now_s < stop_s:
        if not running and waiting[0].due_s > now_s:
            now_s = waiting[0].due_s
        now_s = _step(physics, settings, speed, waiting, running, slots, now_s, steps)
    traces = tuple(_trace(job, physics, stop_s) for job in jobs)
    return RunTrace(
        target="fake",
        workload="fake",
        arrivals=f"poisson:{load.rate}",
        seed=load.seed,
        started_unix_s=0.0,
        duration_s=max(now_s, load.window_s),
        requests=traces,
        steps=tuple(steps),
        client_cpu_share=0.1,
    )


def _step(physics, settings, speed, waiting, running, slots, now_s, steps) -> float:  # type: ignore[no-untyped-def]
    """Admit by the batching policy, compute one step, hand out tokens."""
    new = []
    if settings.batching == "continuous" or not running:
        while waiting and waiting[0].due_s <= now_s and len(running) + len(new) < slots:
            new.append(waiting.pop(0))
    saved = physics.shared if settings.enable_prefix_caching else 0
    prompt = sum(physics.prompt - saved for _ in new)
    took_s = physics.fixed_s + physics.per_seq_s * (len(running) + len(new))
    took_s = (took_s + physics.per_token_s * prompt) / speed
    for job in new:
        job.started_s, job.cached = now_s, saved
    shapes = [(physics.prompt - saved, saved)] * len(new) + [(1, physics.prompt)] * len(running)
    steps.append(_stat(len(steps), now_s, took_s, shapes, len(waiting), slots))
    now_s += took_s
    for job in [*running, *new]:
        job.token_s.append(now_s)
    running[:] = [job for job in [*running, *new] if len(job.token_s) < job.todo]
    return now_s


def _stat(index, at_s, took_s, shapes, num_waiting, slots) -> StepStat:  # type: ignore[no-untyped-def]
    return StepStat(
        index=index,
        at_s=at_s,
        plan_s=0.0002,
        run_s=took_s,
        shapes=tuple(shapes),
        num_sampled=len(shapes),
        num_running=len(shapes),
        num_waiting=num_waiting,
        used_blocks=10 * len(shapes),
        num_blocks=1000,
        max_num_seqs=slots,
        queried_tokens=120,
        hit_tokens=sum(cached for new, cached in shapes if new > 1),
    )


def _trace(job: _Job, physics: Physics, stop_s: float) -> RequestTrace:
    done = len(job.token_s) == job.todo
    return RequestTrace(
        id=job.id,
        kind="chat",
        scheduled_s=job.due_s,
        sent_s=job.due_s,
        started_s=job.started_s,
        token_s=tuple(job.token_s),
        token_counts=(1,) * len(job.token_s),
        finished_s=job.token_s[-1] if done else stop_s,
        prompt_tokens=physics.prompt,
        cached_tokens=job.cached,
        output_tokens=len(job.token_s),
        requested_tokens=physics.output,
        finish_reason="length" if done else "abort",
        error=None if done else "cancelled: unfinished",
    )


def with_physics(fake: Fake, **changes: float) -> Fake:
    fake.physics = replace(fake.physics, **changes)
    return fake
