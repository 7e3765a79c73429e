"""`ResponseStream`: which updates are yielded, when, and together with which others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from ridgeline.records import Event, Failed, Finished, Sampling, Started, Token, Usage
from ridgeline.serve.errors import ApiError
from ridgeline.serve.generation.request import GenerationRequest, TokenPrompt
from ridgeline.serve.generation.stream import ResponseStream
from ridgeline.serve.metrics.registry import Metrics
from tests.serve.fake_engine import FakeEngine

USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)


class ManualEngine(FakeEngine):
    """Emits the events of the test."""

    async def listen(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        sink: Callable[[Sequence[Event]], None],
        **terms: Any,
    ) -> Callable[[], None]:
        self.sink, self.name = sink, terms["request_id"]
        return lambda: self.abort(self.name)

    def token(self, text: str, index: int = 0) -> Token:
        return Token(request_id=self.name, index=index, token=5, text=text, at_s=0.0)

    def end(self, index: int = 0) -> Finished:
        return Finished(request_id=self.name, index=index, reason="stop", at_s=0.0, usage=USAGE)

    def failure(self) -> Failed:
        return Failed(request_id=self.name, at_s=0.0, error="broken")

    async def emit(self, *events: Event) -> None:
        """The events of one step, with time for the consumer to take them."""
        self.sink(events)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Consumer:
    """Reads a stream in a task; `batches` has one text per batch, with "." for an end."""

    def __init__(self, stream: ResponseStream) -> None:
        self.stream, self.batches = stream, list[str]()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for updates in self.stream:
            texts = [update.text + "." * (update.finished is not None) for update in updates]
            self.batches.append("".join(texts))


async def start(
    interval: float = 1, n: int = 1, max_unread_chars: float = math.inf
) -> tuple[ManualEngine, Consumer]:
    engine: Any = ManualEngine()
    request = GenerationRequest(
        id="one", prompts=[TokenPrompt((1,))], sampling=Sampling(n=n, max_tokens=9)
    )
    metrics = Metrics(engine, "fake")
    stream = ResponseStream(
        engine, request, metrics, interval=interval, max_unread_chars=max_unread_chars
    )
    consumer = Consumer(stream)
    await asyncio.sleep(0)
    return cast("ManualEngine", engine), consumer


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        (1, ["", "a", "b", "c", "d", "e", "f."]),
        (2, ["", "ab", "cd", "ef."]),
        (4, ["", "abcd", "ef."]),
        (math.inf, ["", "abcdef."]),
    ],
)
async def test_tokens_are_gathered_except_the_first_batch_and_the_end(
    interval: float, batches: list[str]
) -> None:
    engine, consumer = await start(interval)
    await engine.emit(Started(request_id="one", at_s=0.0, cached_tokens=0))
    for text in "abcde":
        await engine.emit(engine.token(text))
    await engine.emit(engine.token("f"), engine.end())
    await consumer.task
    assert consumer.batches == batches and consumer.stream.is_finished


async def test_first_token_is_yielded_at_once() -> None:
    engine, consumer = await start(interval=100)
    await engine.emit(engine.token("a"))
    await engine.emit(engine.token("b"))
    assert consumer.batches == ["a"]
    await engine.emit(engine.end())
    await consumer.task
    assert consumer.batches == ["a", "b."]


async def test_end_of_one_choice_does_not_wait_for_the_others() -> None:
    engine, consumer = await start(interval=100, n=2)
    await engine.emit()
    await engine.emit(engine.token("a"), engine.token("b", 1))
    await engine.emit(engine.end())
    assert consumer.batches == ["", "ab."] and not consumer.task.done()
    await engine.emit(engine.end(1))
    await consumer.task


async def test_tokens_before_a_failure_are_yielded_first() -> None:
    engine, consumer = await start(interval=100)
    await engine.emit()
    await engine.emit(engine.token("a"))
    await engine.emit(engine.token("b"), engine.failure())
    with pytest.raises(ApiError, match="broken"):
        await consumer.task
    assert consumer.batches == ["", "ab"] and not consumer.stream.is_finished


async def test_failure_before_the_first_batch_is_raised_alone() -> None:
    engine, consumer = await start()
    await engine.emit(engine.failure())
    with pytest.raises(ApiError, match="broken"):
        await consumer.task
    assert consumer.batches == []


async def test_slow_consumer_gets_everything_at_once() -> None:
    engine, consumer = await start()
    await engine.emit(engine.token("a"))
    for text in "bcd":
        engine.sink([engine.token(text)])  # no time for the consumer in between
    await engine.emit(engine.end())
    await consumer.task
    assert consumer.batches == ["a", "bcd."]


async def test_too_much_unread_text_aborts_and_fails() -> None:
    engine, consumer = await start(max_unread_chars=10)
    await engine.emit(engine.token("first"))
    engine.sink([engine.token("x" * 50)])  # one large token alone is not a slow reader
    assert not engine.aborted
    engine.sink([engine.token("y")])
    assert engine.aborted == ["one"]
    with pytest.raises(ApiError, match="too slowly"):
        await consumer.task
    assert consumer.batches == ["first", "x" * 50 + "y"]


async def test_failing_a_finished_stream_has_no_effect() -> None:
    engine, consumer = await start()
    engine.sink([engine.token("a"), engine.end()])
    consumer.stream.fail(ApiError(503, "stopping"))
    await consumer.task
    assert consumer.batches == ["a."]


async def test_closing_twice_aborts_once() -> None:
    engine, consumer = await start()
    await engine.emit(engine.token("a"))
    consumer.task.cancel()
    consumer.stream.close()
    consumer.stream.close()
    assert engine.aborted == ["one"]
