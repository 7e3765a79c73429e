"""One answer as a stream of text: both ways to read it, its end, its abort, its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput, DoesNotFit, UserError
from ridgeline.workflows.text.text_stream import TextStream, prompt_tokens
from ridgeline.workflows.text.transcript import Reply

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)
PROMPT = "def add(a, b):\n    return"


def open_demo() -> Engine:
    return Engine.open(
        "demo", kv_cache_memory_bytes=32 << 20, num_threads=1, enable_prefix_caching=False
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_demo() as opened:
        yield opened


def is_idle(engine: Engine) -> bool:
    counters = engine.counters()
    return counters["num_requests_running"] == 0 and counters["kv_cache_usage_perc"] == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.01)


def test_pieces_join_to_the_text_of_a_batch_call(engine: Engine) -> None:
    [expected] = engine.generate([PROMPT], GREEDY)
    stream = TextStream(engine, PROMPT, GREEDY)
    pieces = list(stream)
    assert "".join(pieces) == expected.text == stream.reply.text == str(stream.reply)
    assert len(pieces) > 3
    reply = stream.reply
    assert reply.finish_reason == "length" and reply.usage == expected.usage
    assert reply.ttft_s is not None and 0 < reply.ttft_s < 10
    assert reply.tokens_per_s == pytest.approx(11 / reply.decode_s)


async def test_async_reading_gives_the_same_pieces(engine: Engine) -> None:
    expected = "".join(TextStream(engine, PROMPT, GREEDY))
    async with TextStream(engine, PROMPT, GREEDY) as stream:
        pieces = [piece async for piece in stream]
    assert "".join(pieces) == expected and stream.reply.finish_reason == "length"


def test_a_stream_ends_only_once(engine: Engine) -> None:
    replies: list[Reply] = []
    stream = TextStream(engine, PROMPT, GREEDY, on_end=replies.append)
    assert list(stream) and list(stream) == []
    stream.close()
    assert replies == [stream.reply]


def test_closed_stream_frees_its_blocks(engine: Engine) -> None:
    with TextStream(engine, PROMPT, ENDLESS) as stream:
        next(stream)
        assert stream.is_open and not is_idle(engine)
    wait_until(lambda: is_idle(engine))
    assert stream.reply.finish_reason == "abort" and not stream.is_open


async def test_cancelled_reader_frees_its_blocks(engine: Engine) -> None:
    received = asyncio.Event()
    stream = TextStream(engine, PROMPT, ENDLESS)

    async def read() -> None:
        async for _ in stream:
            received.set()

    task = asyncio.create_task(read())
    await received.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: is_idle(engine))
    assert stream.reply.finish_reason == "abort"
    assert 0 < stream.reply.usage.completion_tokens < 1500


async def test_many_readers_cancelled_at_random_points_free_all_blocks(engine: Engine) -> None:
    async def read(number: int) -> None:
        async for _ in TextStream(engine, f"# {number}\n", ENDLESS):
            pass

    tasks = [asyncio.create_task(read(number)) for number in range(8)]
    for number, task in enumerate(tasks):
        await asyncio.sleep(0.003 * number)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await asyncio.to_thread(wait_until, lambda: is_idle(engine))


async def test_the_two_ways_of_reading_do_not_mix(engine: Engine) -> None:
    with TextStream(engine, PROMPT, ENDLESS) as stream:
        next(stream)
        with pytest.raises(BadInput, match="read in one way"):
            await anext(stream)


@pytest.mark.slow
def test_an_engine_opened_for_the_stream_is_closed_with_it() -> None:
    opened: list[Engine] = []

    def open_engine() -> Engine:
        opened.append(open_demo())
        return opened[-1]

    assert list(TextStream(open_engine, PROMPT, GREEDY))
    with TextStream(open_engine, PROMPT, ENDLESS) as stream:
        next(stream)
    assert len(opened) == 2
    assert not any(engine.is_healthy() for engine in opened)


async def test_cancellation_while_the_engine_opens_closes_it() -> None:
    opened: list[Engine] = []
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def open_engine() -> Engine:
        loop.call_soon_threadsafe(loading.set)
        opened.append(open_demo())
        return opened[-1]

    task = asyncio.create_task(anext(TextStream(open_engine, PROMPT, GREEDY)))  # type: ignore[arg-type]
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(1000):
        if opened and not opened[0].is_healthy():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine was not closed")


def test_errors_surface_when_reading(engine: Engine) -> None:
    with pytest.raises(BadInput, match="empty"):
        next(TextStream(engine, [], GREEDY))
    with pytest.raises((BadInput, DoesNotFit)) as caught:
        next(TextStream(engine, "a " * 5000, GREEDY))
    assert isinstance(caught.value, UserError) and is_idle(engine)
    with pytest.raises(BadInput, match="one answer"):
        TextStream(engine, PROMPT, Sampling(n=2))


def test_prompts_of_every_kind(engine: Engine) -> None:
    tokens = engine.tokenizer.encode(PROMPT)
    assert list(prompt_tokens(engine, PROMPT)) == list(prompt_tokens(engine, tokens)) == tokens
    messages = [{"role": "user", "content": "hi"}]
    text = engine.tokenizer.decode(prompt_tokens(engine, messages), skip_special_tokens=False)
    assert text == "<|user|>\nhi<|end|>\n<|assistant|>\n"
    with pytest.raises(BadInput, match="list of chat messages; got 'float'"):
        prompt_tokens(engine, [1.5])  # type: ignore[list-item]


def test_reply_displays_escaped(engine: Engine) -> None:
    reply = TextStream(engine, PROMPT, GREEDY).reply
    from msgspec.structs import replace

    hostile = replace(reply, text="<script>alert(1)</script>")
    assert "<script>" not in hostile._repr_html_() and "&lt;script&gt;" in hostile._repr_html_()
