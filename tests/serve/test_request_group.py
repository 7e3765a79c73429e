"""The requests of a request as one series of updates: what is told, when, and together with what."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from ridgeline.records import Event, Failed, Finished, Sampling, Token, Usage
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.stream import Brief, Job, RequestGroup, Update
from ridgeline.serve.metrics.registry import Metrics
from ridgeline.serve.openai.sampling_params import Prompt
from tests.serve.fake_engine import FakeEngine

USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)


class Scripted(FakeEngine):
    """Says what the test says."""

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Callable[[Sequence[Event]], None],
        **terms: Any,
    ) -> Callable[[], None]:
        self.sink, self.name = sink, terms["request_id"]
        return lambda: None

    def token(self, text: str, index: int = 0) -> Token:
        return Token(request_id=self.name, index=index, token=5, text=text, at_s=0.0)

    def end(self, index: int = 0) -> Finished:
        return Finished(request_id=self.name, index=index, reason="stop", at_s=0.0, usage=USAGE)

    def failure(self) -> Failed:
        return Failed(request_id=self.name, at_s=0.0, error="broken")


async def begin(
    interval: float, n: int = 1, brief: Brief | None = None
) -> tuple[Scripted, list[str], asyncio.Task[None]]:
    """An engine that listens, what is told (a text for each time), and the requests under way."""
    engine, told = Scripted(), list[str]()

    def tell(updates: list[Update]) -> None:
        told.append("".join(each.text + "." * (each.finished is not None) for each in updates))

    job = Job(id="one", prompts=[Prompt((1,))], sampling=Sampling(n=n))
    group = RequestGroup(cast("Any", engine), job, Metrics(cast("Any", engine), "fake"), interval)
    task = asyncio.create_task(group.run(tell, brief))
    await asyncio.sleep(0)
    return engine, told, task


@pytest.mark.parametrize(
    ("interval", "wanted"),
    [
        (1, ["", "a", "b", "c", "d", "e", "f."]),
        (2, ["", "ab", "cd", "ef."]),
        (4, ["", "abcd", "ef."]),
        (math.inf, ["", "abcdef."]),
    ],
)
async def test_tokens_are_gathered_but_not_the_first_and_not_the_end(
    interval: float, wanted: list[str]
) -> None:
    engine, told, task = await begin(interval)
    engine.sink([])  # it has begun
    for text in "abcde":
        engine.sink([engine.token(text)])
    engine.sink([engine.token("f"), engine.end()])
    await task
    assert told == wanted


async def test_the_first_token_is_told_at_once() -> None:
    engine, told, task = await begin(100)
    engine.sink([engine.token("a")])
    engine.sink([engine.token("b")])
    assert told == ["a"]
    engine.sink([engine.end()])
    await task
    assert told == ["a", "b."]


async def test_a_choice_that_ends_waits_for_no_other() -> None:
    engine, told, task = await begin(100, n=2)
    engine.sink([])
    engine.sink([engine.token("a"), engine.token("b", 1)])
    engine.sink([engine.end()])
    assert told == ["", "ab."] and not task.done()
    engine.sink([engine.end(1)])
    await task


async def test_who_fails_has_told_all_before() -> None:
    engine, told, task = await begin(100)
    engine.sink([])
    engine.sink([engine.token("a")])
    engine.sink([engine.token("b"), engine.failure()])
    with pytest.raises(ApiError, match="broken"):
        await task
    assert told == ["", "ab"]


async def test_a_failure_before_anything_is_told_is_told_alone() -> None:
    engine, told, task = await begin(1)
    engine.sink([engine.failure()])
    with pytest.raises(ApiError, match="broken"):
        await task
    assert told == []


async def test_tokens_that_come_alone_are_told_briefly_by_whoever_can() -> None:
    briefly: list[tuple[int, str]] = []

    def brief(choice: int, token: Token) -> bool:
        briefly.append((choice, token.text))
        return token.text != "no"

    engine, told, task = await begin(1, 2, brief)
    engine.sink([engine.token("a")])  # the first is never brief
    engine.sink([engine.token("b")])
    engine.sink([engine.token("c", 1)])
    engine.sink([engine.token("no")])
    engine.sink([engine.token("d"), engine.token("e", 1)])
    engine.sink([engine.token("f"), engine.end()])
    engine.sink([engine.token("g", 1)])
    engine.sink([engine.end(1)])
    await task
    assert briefly == [(0, "b"), (1, "c"), (0, "no"), (1, "g")]
    assert told == ["a", "no", "de", "f.", "."]


@pytest.mark.parametrize("interval", [2, math.inf])
async def test_what_is_gathered_is_not_told_briefly(interval: float) -> None:
    engine, told, task = await begin(interval, 1, lambda _choice, _token: 1 / 0 > 0)
    for text in "abc":
        engine.sink([engine.token(text)])
    engine.sink([engine.end()])
    await task
    assert "".join(told) == "abc."


async def test_a_fault_in_telling_briefly_is_its_own_asks_failure() -> None:
    engine, told, task = await begin(1, 1, lambda _choice, _token: 1 / 0 > 0)
    for text in "abc":
        engine.sink([engine.token(text)])
    with pytest.raises(ZeroDivisionError):
        await task
    assert told == ["a"]
