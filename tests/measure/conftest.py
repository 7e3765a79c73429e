"""Virtual time and scripted servers, so that no test waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import pytest

from ridgeline.measure.client.target import Now, Recorder
from ridgeline.measure.workload import LoadRequest
from ridgeline.records import EngineInfo, RequestTrace, RunTrace, StepStat

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait: it moves the clock instead, and by a nanosecond at least, as work would."""

    virtual_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.virtual_s += max(timeout or 0.0, 1e-9)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.virtual_s


@pytest.fixture
def in_virtual_time() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine on a loop whose clock jumps from timer to timer."""

    def run(main: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)

    return run


class ScriptedTarget:
    """`slots` at a time: `prefill_s` to the first token, then one token per `step_s`."""

    name = "scripted"
    info: EngineInfo | None = None

    def __init__(
        self,
        *,
        slots: int = 10**6,
        prefill_s: float = 0.1,
        step_s: float = 0.01,
        fail: Callable[[LoadRequest], str | None] = lambda request: None,
    ) -> None:
        self.prefill_s, self.step_s, self.fail = prefill_s, step_s, fail
        self.served: list[LoadRequest] = []
        self._slots = asyncio.Semaphore(slots)

    async def send(self, request: LoadRequest, record: Recorder) -> None:
        self.served.append(request)
        async with self._slots:
            record.record_start(record.now())
            await asyncio.sleep(self.prefill_s)
            record.record_chunk("a")
            for _ in range(request.max_tokens - 1):
                await asyncio.sleep(self.step_s)
                record.record_chunk("b")
        error = self.fail(request)
        if error is not None:
            record.record_failure(error)
        record.record_finish("length", prompt_tokens=10, output_tokens=request.max_tokens)

    def drain_steps(self, now: Now) -> tuple[StepStat, ...]:
        return ()

    async def close(self) -> None:
        return None


@pytest.fixture
def scripted() -> type[ScriptedTarget]:
    return ScriptedTarget


def _request(**fields: Any) -> RequestTrace:
    """A record with sensible rest: by default two tokens, one at 0.2 s and one at 0.3 s."""
    token_s = tuple(fields.pop("token_s", (0.2, 0.3)))
    counts = tuple(fields.pop("token_counts", (1,) * len(token_s)))
    base: dict[str, Any] = {
        "id": "r",
        "kind": "text",
        "scheduled_s": 0.0,
        "sent_s": fields.get("scheduled_s", 0.0),
        "started_s": None,
        "finished_s": token_s[-1] if token_s else None,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": sum(counts),
        "requested_tokens": sum(counts) or None,
        "finish_reason": "length",
    }
    return RequestTrace(**{**base, "token_s": token_s, "token_counts": counts, **fields})


@pytest.fixture(scope="session")
def request_trace() -> Callable[..., RequestTrace]:
    return _request


def _run(
    requests: Iterable[RequestTrace],
    *,
    steps: Iterable[StepStat] = (),
    duration_s: float | None = None,
    **rest: Any,
) -> RunTrace:
    done = tuple(requests)
    ends = [request.finished_s or 0.0 for request in done]
    base: dict[str, Any] = {
        "target": "scripted",
        "workload": "test",
        "arrivals": "poisson:1.0",
        "seed": 0,
        "started_unix_s": 1.7e9,
        "duration_s": max(ends, default=0.0) if duration_s is None else duration_s,
    }
    return RunTrace(**{**base, "requests": done, "steps": tuple(steps), **rest})


@pytest.fixture(scope="session")
def run_trace() -> Callable[..., RunTrace]:
    return _run


def _step(shapes: Iterable[tuple[int, int]], **fields: Any) -> StepStat:
    shapes = tuple(shapes)
    base: dict[str, Any] = {
        "index": 0,
        "at_s": 0.0,
        "plan_s": 0.001,
        "run_s": 0.01,
        "num_sampled": len(shapes),
        "num_running": len(shapes),
        "num_waiting": 0,
        "used_blocks": 4,
        "num_blocks": 16,
        "max_num_seqs": 8,
    }
    return StepStat(**{**base, "shapes": shapes, **fields})


@pytest.fixture(scope="session")
def step_stat() -> Callable[..., StepStat]:
    return _step
