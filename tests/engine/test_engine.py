"""The public Engine: batches, streams, stop strings, choices, counters, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

import ridgeline
from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput, EngineUnavailable
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.records import Event, Failed, Finished, Started, Token

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as opened:
        yield opened


async def events_of(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


def text_of(events: list[Event], index: int = 0) -> str:
    relevant = [e for e in events if isinstance(e, Token | Finished) and e.index == index]
    return "".join(event.text for event in relevant)


def tokens_of(events: list[Event], index: int = 0) -> list[int]:
    return [e.token for e in events if isinstance(e, Token) and e.index == index]


def test_batch_results_are_in_prompt_order(engine: Engine) -> None:
    prompts = [PROMPT, "import os\n", engine.tokenizer.encode("class A:")]
    found = engine.generate(prompts, GREEDY)
    assert [engine.tokenizer.decode(c.prompt) for c in found] == [PROMPT, "import os\n", "class A:"]
    for completion in found:
        assert completion.text == engine.tokenizer.decode(completion.tokens)
        assert completion.usage.completion_tokens == len(completion.tokens) == 12
        assert completion.answers[0].finish_reason == "length"


def test_each_prompt_can_have_its_own_sampling(engine: Engine) -> None:
    short = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)
    a, b = engine.generate([PROMPT, PROMPT], [GREEDY, short])
    assert a.tokens[:3] == b.tokens and len(a.tokens) == 12
    with pytest.raises(ValueError, match="shorter"):
        engine.generate([PROMPT, PROMPT], [GREEDY])


async def test_stream_yields_the_same_tokens_in_order(engine: Engine) -> None:
    events = await events_of(engine.stream(PROMPT, GREEDY, request_id="mine"))
    [expected] = engine.generate([PROMPT], GREEDY)
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    assert {event.request_id for event in events} == {"mine"}
    assert tuple(tokens_of(events)) == expected.tokens and text_of(events) == expected.text
    instants = [event.at_s for event in events]
    assert instants == sorted(instants)
    assert events[-1].usage.prompt_tokens == len(expected.prompt)


async def test_concurrent_streams_equal_single_ones(engine: Engine) -> None:
    prompts = [f"def function_{i}(" for i in range(9)]
    streams = [events_of(engine.stream(prompt, GREEDY)) for prompt in prompts]
    found = [text_of(events) for events in await asyncio.gather(*streams)]
    assert found == [completion.text for completion in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_choice_in_the_same_step(engine: Engine, include: bool) -> None:
    [free] = engine.generate([PROMPT], GREEDY)
    stop = free.text[4:7]
    before, _, _ = free.text.partition(stop)
    sampling = Sampling(
        temperature=0.0, max_tokens=12, stop=(stop,), include_stop_str_in_output=include
    )
    [found] = engine.generate([PROMPT], sampling)
    answer = found.answers[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert found.text == (before + stop if include else before)
    assert found.usage.completion_tokens == len(found.tokens) < 12
    shorter = engine.tokenizer.decode(found.tokens[:-1])
    assert stop in engine.tokenizer.decode(found.tokens) and stop not in shorter


def test_stop_string_in_the_last_token_wins_over_length(engine: Engine) -> None:
    """The scheduler ends the choice for its length in the same step.

    The stop string takes precedence.
    """
    [free] = engine.generate([PROMPT], GREEDY)
    last = engine.tokenizer.decode(free.tokens[-1:])
    if last in engine.tokenizer.decode(free.tokens[:-1]):
        last = free.text[-len(last) - 6 :]
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(last,))
    answer = engine.generate([PROMPT], sampling)[0].answers[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", last)


def test_stop_token_has_no_text(engine: Engine) -> None:
    [free] = engine.generate([PROMPT], GREEDY)
    place = next(i for i, t in enumerate(free.tokens) if i > 1 and t not in free.tokens[:i])
    sampling = Sampling(temperature=0.0, max_tokens=12, stop_token_ids=(free.tokens[place],))
    answer = engine.generate([PROMPT], sampling)[0].answers[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", free.tokens[place])
    assert answer.text == engine.tokenizer.decode(free.tokens[:place])
    assert answer.tokens == free.tokens[: place + 1]


def test_choices_and_logprobs_are_returned(engine: Engine) -> None:
    sampling = Sampling(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    [found] = engine.generate([PROMPT], sampling)
    again = engine.generate([PROMPT], sampling)[0]
    assert [a.index for a in found.answers] == [0, 1, 2] and found.usage.completion_tokens == 18
    assert [a.tokens for a in found.answers] == [a.tokens for a in again.answers]
    assert len({a.tokens for a in found.answers}) > 1
    for answer in found.answers:
        expected = engine.logprobs_of([*found.prompt, *answer.tokens])
        for place, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            row = expected[len(found.prompt) - 1 + place]
            assert logprob.token == token
            assert logprob.logprob == pytest.approx(row[token], abs=1e-3)
            assert [t for t, _ in logprob.top] == np.argsort(-row, kind="stable")[:2].tolist()
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None
    assert [p.token for p in found.prompt_logprobs[1:] if p] == list(found.prompt[1:])


def test_prefix_is_cached_for_the_second_request(engine: Engine) -> None:
    prompt = "x = 1\n" * 20
    first, second = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert second.usage.cached_tokens >= 32 > first.usage.cached_tokens
    assert first.tokens == second.tokens


async def test_tenants_do_not_share_prefixes(engine: Engine) -> None:
    prompt = "y = 2\n" * 20
    cached = []
    for tenant in ("a", "a", "b"):
        events = await events_of(engine.stream(prompt, GREEDY, tenant=tenant))
        cached.append(events[0].cached_tokens)
    assert cached[1] > 0 and cached[0] == cached[2] == 0


async def test_closing_a_stream_aborts_its_request(engine: Engine) -> None:
    endless = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)
    async with aclosing(engine.stream(PROMPT, endless, request_id="left")) as stream:
        async for event in stream:
            if isinstance(event, Token):
                break
    await _until(lambda: engine.counters()["num_requests_running"] == 0)
    assert engine.counters()["kv_cache_usage_perc"] == 0
    assert tokens_of(await events_of(engine.stream(PROMPT, GREEDY, request_id="left")))


async def _until(done: object, timeout_s: float = 10.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was not met in time")


async def test_abort_ends_the_stream(engine: Engine) -> None:
    endless = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True, n=2)
    events = []
    async for event in engine.stream(PROMPT, endless, request_id="stop me"):
        events.append(event)
        if len(tokens_of(events)) == 3:
            engine.abort("stop me")
    assert [e.reason for e in events if isinstance(e, Finished)] == ["abort", "abort"]
    engine.abort("stop me")
    engine.abort("unknown")


async def test_passed_deadline_fails_the_request(engine: Engine) -> None:
    events = await events_of(engine.stream(PROMPT, GREEDY, timeout_s=0.0))
    assert isinstance(events[-1], Failed) and "deadline" in events[-1].error


@pytest.mark.slow
async def test_the_asyncio_loop_stays_responsive(engine: Engine) -> None:
    """The event loop keeps ticking while the engine computes a long prompt and many answers."""
    gaps, running = [], True

    async def ticker() -> None:
        loop = asyncio.get_running_loop()
        while running:
            began = loop.time()
            await asyncio.sleep(0.005)
            gaps.append(loop.time() - began)

    beating = asyncio.create_task(ticker())
    prompt = engine.tokenizer.encode("z = 3\n" * 300)[:1200]
    await asyncio.gather(*(events_of(engine.stream(prompt, GREEDY)) for _ in range(8)))
    running = False
    await beating
    assert len(gaps) > 20 and sorted(gaps)[len(gaps) * 9 // 10] < 0.1


def test_counters_and_steps_agree(engine: Engine) -> None:
    engine.drain_steps()
    before = engine.counters()
    engine.generate([PROMPT, "a"], GREEDY)
    after, steps = engine.counters(), engine.drain_steps()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["generation_tokens"] == sum(step.num_sampled for step in steps) == 24
    assert grown["request_success_length"] == 2 and grown["num_steps"] == len(steps)
    assert grown["prompt_tokens"] == len(engine.tokenizer.encode(PROMPT)) + 1
    assert max(step.num_running for step in steps) == 2
    assert all(step.run_s > 0 and step.plan_s >= 0 for step in steps)
    assert engine.drain_steps() == []


def test_logprobs_are_a_distribution_at_every_position(engine: Engine) -> None:
    tokens = engine.tokenizer.encode("for i in range(10):")
    found = engine.logprobs_of(tokens)
    assert found.shape == (len(tokens), 4096) and found.dtype == np.float32
    assert np.allclose(np.exp(found).sum(1), 1, atol=1e-4)


def test_info_has_every_setting_and_its_derivation(engine: Engine) -> None:
    info = engine.info
    assert info.settings["num_threads"] == 1 and info.derivations["num_threads"] == "as requested"
    assert set(info.settings) <= set(info.derivations)
    assert info.num_blocks * info.block_size * info.kv_bytes_per_token <= 32 << 20
    assert 0 < engine.load_s < 60 and engine.is_healthy()


def test_close_aborts_running_requests() -> None:
    engine = Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1)
    endless = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)

    async def interrupted() -> list[Event]:
        events = []
        async for event in engine.stream(PROMPT, endless):
            events.append(event)
            if len(events) == 3:
                engine.close()
        return events

    assert asyncio.run(interrupted())[-1].reason == "abort"
    engine.close()
    assert not engine.is_healthy()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.generate([PROMPT], GREEDY)
    with pytest.raises(EngineUnavailable):
        engine.logprobs_of([1])


def test_generate_function_opens_and_closes_an_engine() -> None:
    answer = ridgeline.generate("demo", PROMPT, max_tokens=5, kv_cache_memory_bytes=32 << 20)
    assert isinstance(answer.text, str) and answer.text


def test_model_without_tokenizer_takes_and_yields_token_ids(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model_path("demo") / name)
    with Engine.open(str(tmp_path), kv_cache_memory_bytes=32 << 20) as engine:
        with pytest.raises(
            BadInput,
            match=r"no tokenizer.*holds no tokenizer\.json.*; fix: send the prompt as a list",
        ):
            engine.generate(["text"], GREEDY)
        [found] = engine.generate([[5, 6, 7]], GREEDY)
        assert len(found.tokens) == 12 and found.text == ""
