"""Failures of the runner or the scheduler: which requests fail, and which continue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeline import Engine, Sampling
from ridgeline.config.settings import Settings
from ridgeline.engine.build import assemble
from ridgeline.engine.config import resolve
from ridgeline.engine.scheduler.plan import NoTokenError, StepPlan, StepResult
from ridgeline.engine.scheduler.speculation.base import DraftContext
from ridgeline.errors import EngineUnavailable
from ridgeline.records import Event, Failed, Finished

GREEDY = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
FOUR_CHOICES = Sampling(n=4, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
POISON = 77
RESOLVED = resolve(Settings(model="demo", kv_cache_memory_bytes=32 << 20, num_threads=1))


class Faulty:
    """The real runner, with a fault injected before each step."""

    def __init__(self, inner: object, fault: Callable[[StepPlan], None]) -> None:
        self._inner, self._fault = inner, fault

    def run(self, plan: StepPlan) -> StepResult:
        self._fault(plan)
        return self._inner.run(plan)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def engine_with(fault: Callable[[StepPlan], None]) -> Engine:
    parts = assemble(RESOLVED)
    runner = Faulty(parts.runner, fault)
    return Engine(RESOLVED, replace(parts, runner=runner))


def poisoned(plan: StepPlan) -> None:
    if any(POISON in run.tokens for run in plan.runs):
        raise RuntimeError("the device caught fire")


async def collect(engine: Engine, prompt: list[int]) -> list[Event]:
    return [event async for event in engine.stream(prompt, GREEDY)]


async def test_only_the_faulty_request_fails() -> None:
    """Three requests in one step, one of them poisoned; the others answer as without it."""
    with engine_with(poisoned) as engine:
        alone = [(await collect(engine, prompt))[1:] for prompt in ([5, 6, 7], [8, 9])]
        prompts = [[5, 6, 7], [5, POISON, 9], [8, 9]]
        good, bad, other = await asyncio.gather(*(collect(engine, prompt) for prompt in prompts))
        assert isinstance(bad[-1], Failed) and "caught fire" in bad[-1].error
        for found, expected in zip((good, other), alone, strict=True):
            assert [e.token for e in found[1:-1]] == [e.token for e in expected[:-1]]
            assert isinstance(found[-1], Finished)
        assert engine.is_healthy()
        assert engine.counters()["request_failed"] == 1
        assert engine.counters()["kv_cache_usage_perc"] == 0


def test_failing_batch_call_raises_and_aborts_the_rest() -> None:
    with engine_with(poisoned) as engine:
        with pytest.raises(EngineUnavailable, match="caught fire"):
            engine.generate([[5, 6], [POISON]], GREEDY)
        assert engine.death is None
        assert engine.generate([[5, 6]], GREEDY)[0].tokens


def always(plan: StepPlan) -> None:
    if plan.runs:
        raise MemoryError("no memory left")


async def test_engine_that_fails_every_step_is_unhealthy() -> None:
    with engine_with(always) as engine:
        assert engine.is_healthy()
        for _ in range(3):
            assert isinstance((await collect(engine, [5, 6]))[-1], Failed)
        assert not engine.is_healthy()


async def test_scheduler_failure_fails_every_request() -> None:
    with engine_with(lambda plan: None) as engine:

        def broken(*arguments: object) -> StepPlan:
            raise AssertionError("invariant violated")

        streams = [asyncio.create_task(collect(engine, [5, 6, i])) for i in range(3, 6)]
        await asyncio.sleep(0)
        engine._loop.scheduler.plan = broken
        for events in await asyncio.wait_for(asyncio.gather(*streams), 10):
            assert isinstance(events[-1], Failed | Finished)
            if isinstance(events[-1], Failed):
                assert events[-1].cause == "engine"
        with pytest.raises(EngineUnavailable, match="invariant violated"):
            for _ in range(100):
                await collect(engine, [5])
        assert not engine.is_healthy()
        assert "invariant violated" in str(engine.death)


async def test_engine_without_progress_is_unhealthy() -> None:
    gate = threading.Event()

    def hang(plan: StepPlan) -> None:
        if plan.runs:
            assert gate.wait(20)

    with engine_with(hang) as engine:
        await asyncio.sleep(0.05)
        assert engine.is_healthy(stall_s=0.02), "an idle engine stays healthy"
        asked = asyncio.create_task(collect(engine, [5, 6]))
        await asyncio.sleep(0.1)
        assert not engine.is_healthy(stall_s=0.02) and engine.is_healthy(stall_s=20)
        gate.set()
        assert isinstance((await asked)[-1], Finished)
        assert engine.is_healthy(stall_s=20)


def test_requests_during_close_are_answered_or_rejected() -> None:
    """Every request ends, whenever it was submitted."""
    for pause_s in (0.0, 0.001, 0.005):
        engine = engine_with(lambda plan: None)
        ended: list[object] = []

        def ask(engine: Engine = engine, ended: list[object] = ended) -> None:
            try:
                while True:
                    ended.append(engine.generate([[5, 6]], GREEDY)[0].answers[0].finish_reason)
            except EngineUnavailable as error:
                ended.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(pause_s)
        engine.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert sum(isinstance(end, EngineUnavailable) for end in ended) == 4


class FailingProposer:
    """A proposer that finds no token to choose, as a damaged drafter would."""

    def __init__(self) -> None:
        self.asked, self.forgotten = 0, set[int]()

    def should_propose(self, runs: object) -> bool:
        return True

    def propose(self, contexts: Sequence[DraftContext], room: object) -> list[tuple[int, ...]]:
        self.asked += 1
        raise ArithmeticError("row 0: no token can be chosen from these logits")

    def alternatives(self, seq_id: int) -> Sequence[tuple[int, ...]]:
        return ()

    def observe(self, outcomes: object) -> None:
        pass

    def forget(self, seq_id: int, tokens: Sequence[int], tenant: str) -> None:
        self.forgotten.add(seq_id)

    def counters(self) -> dict[str, float]:
        return {}


@pytest.mark.slow
def test_failing_drafter_ends_no_request() -> None:
    parts, drafts = assemble(RESOLVED), FailingProposer()
    parts.scheduler.draft_scheduler._proposer = drafts
    with Engine(RESOLVED, parts) as engine:
        found = engine.generate([[5, 6, 7]], GREEDY)[0]
        assert found.usage.completion_tokens == 6 and engine.is_healthy()
    assert drafts.asked >= 4 and drafts.forgotten
    with Engine(RESOLVED, assemble(RESOLVED)) as plain:
        assert plain.generate([[5, 6, 7]], GREEDY)[0].answers == found.answers


@pytest.mark.parametrize(
    ("error", "healthy"),
    [(ArithmeticError, True), (RuntimeError, False), (ZeroDivisionError, False)],
)
def test_request_errors_do_not_make_the_engine_unhealthy(
    error: type[Exception], healthy: bool
) -> None:
    def fault(plan: StepPlan) -> None:
        raise error("row 0: no token can be chosen from these logits")

    with engine_with(fault) as engine:
        for _ in range(4):
            with pytest.raises(EngineUnavailable, match="no token"):
                engine.generate([[5, 6, 7]], GREEDY)
        assert engine.is_healthy() is healthy


class RustPanic(BaseException):
    """As pyo3's PanicException: not an Exception."""


def test_panic_in_a_step_fails_its_request_only() -> None:
    def panic(plan: StepPlan) -> None:
        if any(POISON in run.tokens for run in plan.runs):
            raise RustPanic("index out of bounds")

    with engine_with(panic) as engine:
        with pytest.raises(EngineUnavailable, match="index out of bounds"):
            engine.generate([[5, POISON]], GREEDY)
        assert engine.generate([[5, 6]], GREEDY)[0].tokens
        assert engine.is_healthy()


def test_panic_of_the_scheduler_ends_what_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with(lambda plan: None) as engine:

        def panic(now_s: float) -> StepPlan:
            raise RustPanic("index out of bounds")

        monkeypatch.setattr(engine._loop.scheduler, "plan", panic)
        with pytest.raises(EngineUnavailable, match="the engine stopped"):
            engine.generate([[5, 6]], GREEDY)
        with pytest.raises(EngineUnavailable):
            engine.generate([[5, 6]], GREEDY)
        with pytest.raises(EngineUnavailable):
            engine.embed([5, 6], "mean")
        assert not engine.is_healthy()
        assert engine.counters()["engine_alive"] == 0


def test_at_most_one_call_runs_between_two_steps() -> None:
    order: list[str] = []
    gate = threading.Event()

    def note(plan: StepPlan) -> None:
        gate.wait(5)
        if plan.runs:
            order.append("step")

    with engine_with(note) as engine:
        thread = threading.Thread(target=engine.generate, args=([[5, 6]], GREEDY))
        thread.start()
        while not engine._loop._ids:
            time.sleep(0.001)
        futures = [engine._loop.call(lambda: order.append("call"), 7) for _ in range(5)]
        assert engine.counters()["num_queued_tokens"] >= 28
        gate.set()
        for future in futures:
            future.result(10)
        thread.join()
        assert engine.counters()["num_queued"] == engine.counters()["num_queued_tokens"] == 0
    steps = [index for index, what in enumerate(order) if what == "step"]
    assert len(steps) == GREEDY.max_tokens
    assert all(b - a <= 2 for a, b in pairwise(steps)), order


def test_calls_that_are_waiting_end_when_the_engine_is_closed() -> None:
    began, gate = threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return gate.wait(5)

    with engine_with(lambda plan: None) as engine:
        first = engine._loop.call(work)
        assert began.wait(5)
        waiting = engine._loop.call(lambda: None)
        closing = threading.Thread(target=engine.close)
        closing.start()
        while engine._loop._open:
            time.sleep(0.001)
        gate.set()
        closing.join()
        assert first.result(5)
        with pytest.raises(EngineUnavailable):
            waiting.result(5)


def test_choices_of_a_failed_request_are_not_run_one_by_one() -> None:
    """Each would fail as well: one request must not count as several failures of the engine."""
    num_runs = list[int]()

    def compute_nan(plan: StepPlan) -> None:
        num_runs.append(len(plan.runs))
        if len(num_runs) > 1:  # from where all choices are run
            raise NoTokenError("row 0: no token can be chosen from these logits")

    with engine_with(compute_nan) as engine, pytest.raises(EngineUnavailable):
        engine.generate([[5, 6]], FOUR_CHOICES)
    assert num_runs == [1, 4, 1]
    assert engine.counters()["num_nan_logits"] == 1


def test_nan_logits_are_counted_and_end_health() -> None:
    def compute_nan(plan: StepPlan) -> None:
        if plan.runs:
            raise NoTokenError("row 0: no token can be chosen from these logits")

    with engine_with(compute_nan) as engine:
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                engine.generate([[5, 6]], GREEDY)
        assert engine.counters()["num_nan_logits"] == 3
        assert not engine.is_healthy()
