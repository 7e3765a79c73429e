"""Steps launched ahead: the device works while the host plans, and no token changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.engine import Engine
from ridgeline.engine.execution.graphs.ahead import StepsAhead, why_no_steps_ahead
from ridgeline.engine.execution.graphs.decode import DecodeGraphs
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler import (
    BlockPool,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
    make_policy,
)
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import Event, Finished, Request, Sampling, Token
from tests.conformance.tiny_models import VOCAB, make_model
from tests.engine.execution.recorded_graphs import RecordedCapture

BLOCK_SIZE, MAX_LEN = 4, 64


class FakeDevice:
    """A queue that works in order on a separate thread, and only while `gate` lets it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.gate: Callable[[int], None] = lambda _: None
        self.log: list[str] = []
        self._count = 0

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        number = self._count
        self._count += 1
        self.log.append(f"launch {number}")

        def run() -> None:
            self.gate(number)
            work()
            self.log.append(f"done {number}")

        future = self._thread.submit(run)

        def wait() -> None:
            future.result(timeout=20)

        return wait

    def finish(self) -> None:
        """Wait for everything that was submitted."""
        self._thread.submit(lambda: None).result(timeout=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[ModelSpec, Decoder]:
    path: Path = tmp_path_factory.mktemp("llama")
    make_model("llama", path)
    spec = load_spec(str(path))
    return spec, load_decoder(
        str(path), spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )


class World:
    """A scheduler and a runner, with steps launched ahead on a fake device or without."""

    def __init__(
        self, model: tuple[ModelSpec, Decoder], *, ahead: bool, num_blocks: int = 40
    ) -> None:
        spec, decoder = model
        cache = KvCache.allocate(spec, num_blocks + 1, BLOCK_SIZE, torch.float32, "cpu")
        attention = build_attention("tables", spec, cache)
        assert isinstance(attention, TableAttention)
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(
            limits, make_policy("continuous"), pool, PrefixCache(pool), eos_token_ids=(1,), seed=0
        )
        self.runner = TorchRunner(decoder, cache, attention)
        graphs = DecodeGraphs(decoder, attention, MAX_LEN, RecordedCapture())
        self.runner.use_graphs(graphs)
        self.device = FakeDevice()
        if ahead:
            self.ahead = StepsAhead(graphs, self.device, BLOCK_SIZE)
            self.runner.use_steps_ahead(self.ahead)
            self.scheduler.draft_scheduler.reserves_ahead = True
        self.outputs: dict[str, list[int]] = {}
        self.num_preempted = 0

    def add(self, name: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self.outputs[name] = []
        self.scheduler.add(Request(id=name, prompt=prompt, sampling=sampling, arrival_s=0.0))

    def step(self) -> list[Event]:
        plan = self.scheduler.plan(0.0)
        self.device.log.append(f"planned {plan.index}")
        events = self.scheduler.commit(plan, self.runner.run(plan), 0.0)
        self.num_preempted += self.scheduler.stats().num_preempted
        for event in events:
            if isinstance(event, Token):
                self.outputs[event.request_id].append(event.token)
        return events

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


def greedy(length: int, **fields: Any) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=length, **fields)


def test_device_runs_the_next_step_while_the_host_plans_it(
    model: tuple[ModelSpec, Decoder],
) -> None:
    """The device may not begin a step before the host has planned it: were the step launched only
    after that, or were the host to wait for it, the first would be logged or time out."""
    world = World(model, ahead=True)
    world.add("a", (5, 6, 7), greedy(20, ignore_eos=True))
    world.step()  # the prompt
    planned = threading.Semaphore(0)

    def gate(number: int) -> None:
        if number >= 1:  # the first decode step has nothing before it
            assert planned.acquire(timeout=10), "the host waited for a step before planning it"

    world.device.gate = gate
    for _ in range(6):
        plan = world.scheduler.plan(0.0)
        if plan.index > 1:
            planned.release()
        world.device.log.append(f"planned {plan.index}")
        world.scheduler.commit(plan, world.runner.run(plan), 0.0)
    planned.release(99)
    world.finish()
    log = world.device.log
    for number in range(1, 6):  # step n is plan n + 1: plan 0 was the prompt
        assert log.index(f"launch {number}") < log.index(f"planned {number + 1}"), log
        assert log.index(f"planned {number + 1}") < log.index(f"done {number}"), log
        assert log.index(f"launch {number + 1}") < log.index(f"done {number}"), log


def test_one_copy_of_integers_for_each_step(
    model: tuple[ModelSpec, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.engine.execution.graphs.inputs import StepInputs

    copies: list[object] = []
    copy = StepInputs.copy
    world = World(model, ahead=True)
    for name in ("a", "b"):
        world.add(name, (5, 6, 7), greedy(6, ignore_eos=True))
    world.step()
    world.step()
    world.device.finish()
    monkeypatch.setattr(
        StepInputs, "copy", lambda self, turn: (copies.append(0), copy(self, turn))[1]
    )
    launched = world.ahead.counts.num_launched
    world.step()
    world.step()
    world.ahead.forget()
    world.device.finish()
    assert len(copies) == world.ahead.counts.num_launched - launched == 2


def drive(world: World, seed: int) -> dict[str, list[int]]:
    """Requests that arrive, are cancelled, stop and are stopped from outside, by a seed."""
    rng = random.Random(seed)
    names = iter(range(100))
    live: list[str] = []
    for _ in range(40):
        if rng.random() < 0.25:
            name = f"r{next(names)}"
            length = rng.randint(1, 14)
            prompt = tuple(rng.randrange(2, VOCAB) for _ in range(length))
            kinds = [greedy(rng.randint(2, 18)), greedy(12, stop_token_ids=(7, 11, 30))]
            kinds += [Sampling(temperature=0.8, seed=3, max_tokens=6), greedy(8, min_tokens=4)]
            world.add(name, prompt, rng.choice(kinds))
            live.append(name)
        if live and rng.random() < 0.06:
            world.scheduler.cancel(live.pop(rng.randrange(len(live))), 0.0)
        if live and rng.random() < 0.06:
            # As a stop string does, which the text of a token completes.
            world.scheduler.finish(live.pop(rng.randrange(len(live))), 0, now_s=0.0)
        world.step()
    world.finish()
    return world.outputs


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_give_the_tokens_of_the_synchronous_loop(
    model: tuple[ModelSpec, Decoder], seed: int
) -> None:
    worlds = [World(model, ahead=ahead, num_blocks=14 + seed) for ahead in (False, True)]
    plain, ahead = (drive(world, seed) for world in worlds)
    assert set(plain) == set(ahead)
    for name, tokens in plain.items():
        # Reserving ahead may change which step preempts, and so when a request from outside ends.
        both = min(len(tokens), len(ahead[name]))
        assert tokens[:both] == ahead[name][:both], name
    counts = worlds[1].ahead.counts
    assert counts.num_used > 0 and counts.num_used + counts.num_dropped <= counts.num_launched


def test_most_steps_of_steady_decoding_are_launched_ahead(
    model: tuple[ModelSpec, Decoder],
) -> None:
    world = World(model, ahead=True)
    for index in range(3):
        world.add(f"r{index}", tuple(range(2, 5 + index)), greedy(24, ignore_eos=True))
    world.finish()
    counts = world.ahead.counts
    assert counts.num_used >= 20 and counts.num_dropped <= 2
    assert world.runner.graph_counters()["num_steps_used_ahead"] == counts.num_used


def test_steps_ahead_share_the_graphs_of_the_others(model: tuple[ModelSpec, Decoder]) -> None:
    world = World(model, ahead=True)
    world.add("a", (5, 6, 7), greedy(12, ignore_eos=True))
    world.finish()
    graphs = world.runner.graphs
    assert graphs is not None
    assert graphs.counts.num_graphs == len(graphs.counts.by_bucket) == 1
    assert world.ahead.counts.num_used >= 8


def test_step_that_does_not_agree_with_the_plan_is_dropped(
    model: tuple[ModelSpec, Decoder],
) -> None:
    world, plain = World(model, ahead=True), World(model, ahead=False)
    for one in (world, plain):
        one.add("a", (5, 6, 7), greedy(12, ignore_eos=True))
        one.step()
        one.step()
        one.add("b", (9, 10, 11), greedy(12, ignore_eos=True))
        one.finish()
    assert world.outputs == plain.outputs
    assert world.ahead.counts.num_dropped >= 1


def test_sequence_that_ends_is_left_out_of_the_step_ahead(
    model: tuple[ModelSpec, Decoder],
) -> None:
    world, plain = World(model, ahead=True), World(model, ahead=False)
    for one in (world, plain):
        one.add("a", (5, 6, 7), greedy(4, ignore_eos=True))
        one.add("b", (9, 10, 11), greedy(12, ignore_eos=True))
        one.finish()
    assert world.outputs == plain.outputs
    assert world.ahead.counts.num_dropped <= 1  # the last one, whose sequences have ended


def test_reasons_against_launching_ahead() -> None:
    assert why_no_steps_ahead(None, "no CUDA graphs: x", drafts=False, moves_blocks="") == (
        "no CUDA graphs: x"
    )
    assert "drafts" in str(why_no_steps_ahead(None, "", drafts=True, moves_blocks=""))
    assert "a tier" in str(why_no_steps_ahead(None, "", drafts=False, moves_blocks="a tier"))


def test_option_is_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(CannotRun, match="--async-scheduling cannot run here: no CUDA graphs"):
        Engine.open("demo", device="cpu", async_scheduling=True, max_model_len=64)


def test_finished_requests_end_once(model: tuple[ModelSpec, Decoder]) -> None:
    world = World(model, ahead=True)
    world.add("a", (5, 6, 7), greedy(5, ignore_eos=True))
    ends = 0
    while world.scheduler.has_work:
        ends += sum(isinstance(event, Finished) for event in world.step())
    assert ends == 1 and len(world.outputs["a"]) == 5
