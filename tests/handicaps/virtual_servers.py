"""Twins of servers on a virtual clock, as an environment of the search: no process, no waiting.

The truth is the twin of the command line that the driver would run. The simulator of the search
believes something else: its step times are off by a factor that grows with the batch, and it does
not know what drafts are worth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from ridgeline.config.settings import Settings
from ridgeline.engine.scheduler import (
    BlockPool,
    NoPrefixCache,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.measure.client.load_client import OnFinish
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.optimize.environment import Deployment, Environment, Load, Simulator, arrival_times_s
from ridgeline.optimize.external.server_deployment import server_info
from ridgeline.optimize.external.server_rungs import with_server_rungs
from ridgeline.optimize.ladder import Ladder, load_default_ladder
from ridgeline.plan.simulate.fleet import simulate_fleet
from ridgeline.plan.simulate.kv_tiers import add_tiers
from ridgeline.plan.simulate.records import FleetConfig, ReplicaConfig, SimulatedRequest
from ridgeline.plan.simulate.summary import traces
from ridgeline.plan.step_time.simulated import LinearSteps, StepTimes
from ridgeline.records import EngineInfo, RequestTrace, RunTrace, Sampling, StepStat
from ridgeline.roofline import Peaks, Work
from ridgeline.twin.build import TwinModel, block_bytes_of, plan_twin, step_times_of, tiers_of
from ridgeline.twin.config import TwinConfig
from ridgeline.twin.servers.behaviour import TwinRun, twin_of
from ridgeline.twin.servers.command_line import find_command
from ridgeline.twin.synthetic_model import SyntheticModel
from ridgeline.workflows.optimize.restartable_server import (
    RestartableServer,
    ServerRecipe,
    server_recipe,
)

planned = lru_cache(maxsize=None)(plan_twin)

MODESTY = 1.25  # exponent of the acceptance of drafts that the search's simulator believes
VOCAB = 64
BLOCK = 512  # tokens of a shared prefix block
COARSE = 128  # tokens of a KV block: the twin's sixteen would cost eight times the bookkeeping


COMMANDS = {
    "vllm": "vllm serve {model}",
    "sglang": "sglang serve --model-path {model}",
    "trtllm": "trtllm-serve serve {model}",
    "tgi": "text-generation-launcher --model-id {model}",
    "llama-server": "llama-server -m {model}",
}
START_S = 45.0  # of a server's start
SIMULATED_RUN_S = 0.3  # of a prediction
SLOWEST_TPOT_S = 0.11  # beyond every SLO: a request that takes longer after a run has missed it


@dataclass(frozen=True)
class Traffic:
    """Equal requests; the first `shared` tokens of a prompt are one of `num_prefixes`."""

    prompt: int = 512
    output: int = 96
    shared: int = 0
    num_prefixes: int = 4


@dataclass
class VirtualServers:
    """One server to tune: its command line, the devices, and the traffic.

    `noise`: standard deviation of the speed of a run. `loss_nats`: noise on the log-probabilities
    of servers with a changed KV or weight format. `belief`: factor on the step times that the
    search's simulator believes, at a batch of 64. `drafters`, `commands`: as the options
    `--candidate-drafter` and `--candidate-cmd` have them.
    """

    server: str
    flags: str
    traffic: Traffic = field(default_factory=Traffic)
    device: str = "h100-sxm"
    num_devices: int = 1
    acceptance: float = 0.6
    model: str = "llama-3.1-8b"
    noise: float = 0.01
    loss_nats: float = 0.03
    belief: float = 1.15
    drafters: tuple[str, ...] = ()
    drafter_acceptance: float = 0.75
    commands: tuple[str, ...] = ()
    now_s: float = 0.0
    num_runs: int = 0
    _configs: dict[Settings, TwinConfig] = field(default_factory=dict)

    @cached_property
    def recipe(self) -> ServerRecipe:
        words = COMMANDS[self.server].format(model=self.model)
        device = f"{self.device}:{self.num_devices}"
        command = f"ridgeline twin --device {device} {words} {self.flags} --port {{port}} {{flags}}"
        url = "http://127.0.0.1:{port}"
        server = RestartableServer(
            url=url,
            restart_cmd=command,
            num_devices=self.num_devices,
            candidate_drafters=self.drafters,
            candidate_commands=self.commands,
        )
        return server_recipe(server, Path("/nonexistent"))

    @cached_property
    def start(self) -> Settings:
        return self.recipe.start_settings(Settings(model=f"dummy:{self.model}"))

    @property
    def defaults(self) -> Settings:
        return self.recipe.default_settings(Settings(model=f"dummy:{self.model}"))

    @cached_property
    def ladder(self) -> Ladder:
        ladder = with_server_rungs(load_default_ladder(), self.recipe.flags, self.num_devices)
        rungs = (*ladder.rungs, *self.recipe.candidate_rungs)
        return msgspec.structs.replace(ladder, rungs=rungs)

    def clock(self) -> float:
        return self.now_s

    def config(self, settings: Settings) -> TwinConfig:
        """The twin of the command line that the driver would run."""
        if settings not in self._configs:
            self._configs[settings] = self._config(settings)
        return self._configs[settings]

    def _config(self, settings: Settings) -> TwinConfig:
        found = find_command(
            self.recipe.command.text(self.recipe.flags.words(settings, self.start))
        )
        assert found is not None
        run = TwinRun(
            device=self.device,
            num_devices=self.num_devices,
            acceptance=self.acceptance,
            drafter_acceptance=self.drafter_acceptance,
        )
        return twin_of(found[1], run)

    def simulate(self, settings: Settings, load: Load, speed: float = 1.0) -> RunTrace:
        config = self.config(settings)
        return simulated_run(config, planned(config), self.traffic, load, speed)

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Deployment]:
        self.now_s += START_S
        planned(self.config(settings))  # refuses to start where the server would
        yield VirtualDeployment(self, settings)

    def environment(self, simulator: Simulator | None = None) -> Environment:
        traffic = self.traffic
        return Environment(
            open=self.open,
            simulator=simulator or VirtualSimulator(self),
            price_of=lambda settings: lambda shapes, sampled: Work(flops=1e9, bytes=1e9),
            peaks_of=lambda settings: Peaks(flops_s=1e15, bytes_s=3e12, dtype="bfloat16"),
            facts={
                "shared_prompt_share": traffic.shared / traffic.prompt,
                "device": "cuda",
                "model_experts": load_planning_spec(self.model).layers[-1].mlp.num_experts,
                **self.recipe.facts,
            },
            heldout=tuple(
                tuple(random.Random(i).choices(range(3, VOCAB), k=128)) for i in range(64)
            ),
            check_prompts=((5, 6, 7), (8, 9, 10)),
            longest_output=traffic.output,
            vocab_size=VOCAB,
            steps_of=lambda run, settings: (),
            near_tie=0.1,
        )


def simulated_run(
    config: TwinConfig,
    model: TwinModel,
    traffic: Traffic,
    load: Load,
    speed: float,
    belief: float = 1.0,
) -> RunTrace:
    """The run on a virtual clock, with the engine's scheduler."""
    times_s = arrival_times_s(load)
    prefix = tuple(range(traffic.shared // BLOCK))
    rng = random.Random(load.seed)
    requests = [
        SimulatedRequest(
            at_s=at_s * speed,
            num_prompt=traffic.prompt,
            num_output=traffic.output,
            prefix=tuple(p + 1000 * rng.randrange(traffic.num_prefixes) for p in prefix),
            prefix_block=BLOCK,
            session=str(i),
        )
        for i, at_s in enumerate(times_s)
    ]
    stop_s = (load.window_s + load.grace_s) * speed
    outcome = simulate_fleet(
        requests,
        FleetConfig(
            replicas=(_replica(config, model, belief, is_shared=bool(prefix)),) * config.dp,
            seed=load.seed,
        ),
        end_s=stop_s + SLOWEST_TPOT_S * traffic.output,
    )
    rows = [
        row
        if row.finished_s is not None and row.finished_s <= stop_s
        else msgspec.structs.replace(row, error="cancelled: unfinished", finish_reason="abort")
        for row in traces(outcome, len(requests))
    ]
    return RunTrace(
        target="virtual",
        workload="virtual",
        arrivals=f"poisson:{load.rate}",
        seed=load.seed,
        started_unix_s=0.0,
        duration_s=max(min(outcome.duration_s, stop_s) / speed, load.window_s),
        requests=tuple(_scaled(row, speed, traffic.output) for row in rows),
        client_cpu_share=0.1,
    )


def _scaled(row: RequestTrace, speed: float, num_output: int) -> RequestTrace:
    """Times divided by `speed`; tokens spread evenly between the first and the last."""
    tokens = row.token_s
    if len(tokens) == 2:
        tokens = tuple(np.linspace(tokens[0], tokens[1], num_output).tolist())
    return msgspec.structs.replace(
        row,
        scheduled_s=row.scheduled_s / speed,
        sent_s=row.sent_s / speed,
        started_s=None if row.started_s is None else row.started_s / speed,
        token_s=tuple(at_s / speed for at_s in tokens),
        token_counts=(1,) * len(tokens),
        finished_s=row.finished_s / speed,
    )


def _replica(
    config: TwinConfig, model: TwinModel, belief: float, *, is_shared: bool
) -> ReplicaConfig:
    """`is_shared`: prompts have common prefixes; without, a cache that never hits is left out."""
    limits = SchedulerLimits(
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
    )

    def make_scheduler() -> Scheduler:
        pool = BlockPool(model.num_kv_tokens // COARSE, COARSE)
        is_cached = config.enable_prefix_caching and is_shared
        cache = PrefixCache(pool) if is_cached else NoPrefixCache()
        scheduler = Scheduler(limits, make_policy(config.batching), pool, cache)
        coarse = msgspec.structs.replace(config, block_size=COARSE)
        add_tiers(scheduler, tiers_of(coarse, model), block_bytes_of(coarse, model))
        return scheduler

    times: StepTimes = step_times_of(config, model.replica)
    if belief != 1.0:
        times = BelievedStepTimes(times, belief)
    return ReplicaConfig(name="twin", scheduler=make_scheduler, step_times=times)


class BelievedStepTimes:
    """Step times that are off: by `factor` at 64 sequences, and by its root at 8."""

    def __init__(self, times: StepTimes, factor: float) -> None:
        self._times, self._factor = times, factor

    def _off(self, num_seqs: int) -> float:
        return float(self._factor ** (math.log2(max(1, num_seqs)) / 6))

    def step_s(self, shapes: Sequence[tuple[int, int]], num_sampled: int) -> float:
        return self._off(len(shapes)) * self._times.step_s(shapes, num_sampled)

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        steps, off = self._times.linear_steps(computed, num_steps), self._off(len(computed))
        return None if steps is None else LinearSteps(off * steps.first_s, off * steps.more_s)


class VirtualSimulator:
    """Believes nearly the twin's step times, and slightly less of drafts than they are worth."""

    def __init__(self, servers: VirtualServers) -> None:
        self._servers = servers
        self._runs: dict[tuple[TwinConfig, Load], RunTrace] = {}

    def learn(self, settings: Settings, steps: Sequence[StepStat]) -> None:
        pass

    def run(self, settings: Settings, load: Load) -> RunTrace:
        servers = self._servers
        servers.now_s += SIMULATED_RUN_S
        config = servers.config(settings)
        config = msgspec.structs.replace(config, acceptance=config.acceptance**MODESTY)
        if (config, load) not in self._runs:  # flags without effect are one twin
            self._runs[config, load] = simulated_run(
                config, planned(config), servers.traffic, load, 1.0, servers.belief
            )
        return self._runs[config, load]


def synthetic_model(noise_nats: float) -> SyntheticModel:
    return SyntheticModel(range(3, VOCAB), (), noise_nats=noise_nats)


@lru_cache(maxsize=4096)
def logprobs_of(tokens: tuple[int, ...], noise_nats: float) -> np.ndarray:
    """Log-probabilities after every token of a text, (num_tokens, VOCAB)."""
    model = synthetic_model(noise_nats)
    rows = [model.logprobs(t, i, 3, 20).top for i, t in enumerate(tokens)]
    logprobs_TV = np.full((len(rows), VOCAB), math.log(0.05 / (VOCAB - 20)))
    for row_V, row in zip(logprobs_TV, rows, strict=True):
        for token, value in row:
            row_V[token] = value
    return logprobs_TV - np.log(np.exp(logprobs_TV).sum(1, keepdims=True))


class VirtualDeployment:
    def __init__(self, servers: VirtualServers, settings: Settings) -> None:
        self._servers, self.settings = servers, settings
        config = servers.config(settings)
        is_lossy = config.weight_dtype is not None or config.kv_dtype is not None
        self._noise_nats = servers.loss_nats if is_lossy else 0.0
        self._model = synthetic_model(self._noise_nats)

    @property
    def info(self) -> EngineInfo:
        return server_info(self.settings, {}, self._servers.model)

    async def run(self, load: Load, on_finish: OnFinish | None = None) -> RunTrace:
        servers = self._servers
        servers.num_runs += 1
        rng = random.Random(f"{load.seed}/{servers.num_runs}")
        run = servers.simulate(self.settings, load, math.exp(rng.gauss(0, servers.noise)))
        servers.now_s += run.duration_s
        return run

    async def greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        self._servers.now_s += max_tokens * 0.01
        return [self._continue(prompt, max_tokens) for prompt in prompts]

    def _continue(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        tokens = list(prompt)
        point = SamplePoint(sampling=Sampling(temperature=0.0), seed=0, index=0, num_prompt=1)
        for _ in range(max_tokens):
            tokens.append(self._model.next_token(tokens[-1], len(tokens) - 1, point))
        return tuple(tokens[len(prompt) :])

    def margin(self, prompt: Sequence[int], output: Sequence[int], place: int) -> float:
        return 1.0

    def margin_variation(self) -> float:
        return 0.0

    def logprobs_of(self, tokens: Sequence[int]) -> np.ndarray:
        return logprobs_of(tuple(tokens), self._noise_nats)
