"""A request resumed with the tokens that another engine generated ends as if never interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput
from ridgeline.records import Event, Failed, Finished, OutputGrammar, Started, Token

PROMPT = "def add(a, b):\n    return"
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": '
SCHEMA += '{"type": "integer"}}, "required": ["name", "n"], "additionalProperties": false}'

CASES = {
    "greedy": Sampling(temperature=0.0, max_tokens=24, ignore_eos=True),
    "seeded": Sampling(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True),
    "top_p": Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=24),
    "penalties": Sampling(
        temperature=0.7,
        seed=5,
        frequency_penalty=0.8,
        presence_penalty=0.4,
        repetition_penalty=1.2,
        max_tokens=24,
        ignore_eos=True,
    ),
    "min_tokens": Sampling(temperature=1.0, seed=11, min_tokens=12, max_tokens=24),
    "grammar": Sampling(
        temperature=1.0, seed=2, max_tokens=60, structured=OutputGrammar("json", SCHEMA)
    ),
    "logprobs": Sampling(temperature=0.0, logprobs=3, max_tokens=16, ignore_eos=True),
    "several": Sampling(temperature=1.0, seed=9, n=3, max_tokens=16, ignore_eos=True),
    "stop": Sampling(temperature=0.0, max_tokens=24, stop=("\n\n", "def "), ignore_eos=True),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as opened:
        yield opened


async def run(
    engine: Engine, sampling: Sampling, resumed: Sequence[Sequence[int]] = ()
) -> list[Event]:
    return [event async for event in engine.stream(PROMPT, sampling, resumed=resumed)]


Output = tuple[list[int], str, str, str | int | None, int]


def output_of(events: list[Event], index: int) -> Output:
    """Tokens, text, finish reason, stop reason and number of tokens of a choice."""
    own = [e for e in events if isinstance(e, Token | Finished) and e.index == index]
    end = own[-1]
    assert isinstance(end, Finished)
    tokens = [event.token for event in own if isinstance(event, Token)]
    text = "".join(event.text for event in own)
    return tokens, text, end.reason, end.stop_reason, end.usage.completion_tokens


@pytest.mark.parametrize("name", CASES)
async def test_resumed_request_continues_exactly(engine: Engine, name: str) -> None:
    sampling = CASES[name]
    whole = await run(engine, sampling)
    outputs = [output_of(whole, index) for index in range(sampling.n)]
    longest = max(len(output[0]) for output in outputs)
    for cut in sorted({1, 2, 5, longest // 2, longest - 1, longest}):
        resumed = [output[0][:cut] for output in outputs]
        events = await run(engine, sampling, resumed)
        assert [output_of(events, i) for i in range(sampling.n)] == outputs, f"cut at {cut}"
        assert not any(isinstance(event, Failed) for event in events)


async def test_every_cut_of_a_penalised_grammar_continues_exactly(engine: Engine) -> None:
    sampling = Sampling(
        temperature=1.0,
        seed=4,
        frequency_penalty=0.5,
        max_tokens=60,
        structured=OutputGrammar("json", SCHEMA),
    )
    whole = output_of(await run(engine, sampling), 0)
    for cut in range(len(whole[0]) + 1):
        assert output_of(await run(engine, sampling, [whole[0][:cut]]), 0) == whole, cut


async def test_choices_may_have_resumed_tokens_of_unequal_length(engine: Engine) -> None:
    sampling = CASES["several"]
    outputs = [output_of(await run(engine, sampling), i) for i in range(3)]
    for cuts in ((0, 3, 0), (16, 0, 5), (5, 0, 0), (16, 16, 15), (0, 0, 16)):
        resumed = [output[0][:cut] for output, cut in zip(outputs, cuts, strict=True)]
        events = await run(engine, sampling, resumed)
        assert [output_of(events, i) for i in range(3)] == outputs, cuts


async def test_complete_output_is_reported_without_computing(engine: Engine) -> None:
    whole = output_of(await run(engine, CASES["greedy"]), 0)
    before = engine.counters()["num_steps"]
    events = await run(engine, CASES["greedy"], [whole[0]])
    assert output_of(events, 0) == whole and engine.counters()["num_steps"] == before
    assert not any(isinstance(event, Started) for event in events)


async def test_logprobs_of_new_tokens_are_those_of_the_whole_request(engine: Engine) -> None:
    whole = [e for e in await run(engine, CASES["logprobs"]) if isinstance(e, Token)]
    cut = [token.token for token in whole[:6]]
    again = [e for e in await run(engine, CASES["logprobs"], [cut]) if isinstance(e, Token)]
    assert [t.logprobs for t in again[:6]] == [None] * 6
    assert [t.logprobs for t in again[6:]] == [t.logprobs for t in whole[6:]]


async def test_bad_resumed_tokens_are_refused(engine: Engine) -> None:
    sampling = CASES["greedy"]
    with pytest.raises(BadInput, match="resumed output"):
        await run(engine, sampling, [[-1]])
    with pytest.raises(BadInput, match="more resumed tokens"):
        await run(engine, sampling, [[5] * 25])
    with pytest.raises(BadInput, match="more choices"):
        await run(engine, sampling, [[5], [5]])


async def test_resumed_tokens_that_break_the_grammar_fail_the_request_only(engine: Engine) -> None:
    events = await run(engine, CASES["grammar"], [engine.tokenizer.encode("not json")])
    assert isinstance(events[-1], Failed)
    assert output_of(await run(engine, CASES["greedy"]), 0)[4] == 24
