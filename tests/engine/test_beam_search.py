"""Beam search against transformers on tiny random models, however it is batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput
from ridgeline.records import BeamSearch, Failed, Finished
from tests.conformance.tiny_models import VOCAB, make_model

STOPS = (7, 20, 33)
SIZES: dict[str, Any] = {"num_threads": 1, "block_size": 4}
CASES = {
    "default": (3, BeamSearch()),
    "early": (4, BeamSearch(early_stopping=True)),
    "never": (2, BeamSearch(length_penalty=1.7, early_stopping="never")),
    "short": (5, BeamSearch(length_penalty=-0.5)),
    "long": (3, BeamSearch(length_penalty=2.0)),
}


def prompts(num: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (5 + i,), generator=generator).tolist() for i in range(num)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("beams") / "llama"
    return make_model("llama", path), path


@pytest.fixture(scope="module")
def engine(model: tuple[Any, Path]) -> Iterator[Engine]:
    with Engine.open(str(model[1]), kv_cache_memory_bytes=1 << 20, **SIZES) as opened:
        yield opened


def sampling(name: str, max_tokens: int = 12, **fields: Any) -> Sampling:
    width, params = CASES[name]
    return Sampling(
        n=width,
        beam=params,
        temperature=0.0,
        max_tokens=max_tokens,
        stop_token_ids=STOPS,
        **fields,
    )


def oracle(model: Any, prompt: list[int], name: str, max_tokens: int = 12) -> list[list[int]]:
    width, params = CASES[name]
    ends = [1, *STOPS]
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
    )
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        outputs.append(row[: end + 1])
    return outputs


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_transformers(
    model: tuple[Any, Path], engine: Engine, name: str
) -> None:
    texts = prompts(3, seed=sum(map(ord, name)))
    for text, found in zip(texts, engine.generate(texts, sampling(name)), strict=True):
        assert [list(own.tokens) for own in found.answers] == oracle(model[0], text, name)
        for own in found.answers:
            ended = own.tokens[-1] in (1, *STOPS)
            assert own.finish_reason == ("stop" if ended else "length")
            assert own.stop_reason == (own.tokens[-1] if own.tokens[-1] in STOPS else None)


def test_batching_and_preemption_change_no_output(model: tuple[Any, Path], engine: Engine) -> None:
    texts = prompts(4, seed=2)
    plain = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    chosen = [sampling("default", 20), plain, sampling("early", 20), sampling("short", 20)]
    expected = [engine.generate([t], s)[0].answers for t, s in zip(texts, chosen, strict=True)]
    for slots, memory in ((2, 1 << 20), (8, 24 << 10)):
        with Engine.open(
            str(model[1]),
            kv_cache_memory_bytes=memory,
            max_model_len=40,
            max_num_seqs=slots,
            **SIZES,
        ) as small:
            found = small.generate(texts, chosen)
            assert [own.answers for own in found] == expected
            counters = small.counters()
        assert counters["num_preemptions"] > 0
        assert counters["num_requests_running"] == counters["kv_cache_usage_perc"] == 0


def test_speculation_leaves_beams_alone(model: tuple[Any, Path], engine: Engine) -> None:
    texts = prompts(2, seed=8)
    expected = [own.answers for own in engine.generate(texts, sampling("default"))]
    with Engine.open(
        str(model[1]),
        kv_cache_memory_bytes=1 << 20,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        **SIZES,
    ) as drafting:
        assert [own.answers for own in drafting.generate(texts, sampling("default"))] == expected


async def test_aborted_search_ends_every_choice(engine: Engine) -> None:
    events, iterator = [], engine.stream(prompts(1, 4)[0], sampling("default", 60), request_id="x")
    async for event in iterator:
        if not events:
            engine.abort("x")
        events.append(event)
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.index for end in ends] == [0, 1, 2]
    assert not any(isinstance(event, Failed) for event in events)
    assert engine.counters()["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.0, "stop": ("x",)},
        {"temperature": 0.0, "logit_bias": {3: 1.0}},
        {"temperature": 0.0, "min_tokens": 2},
    ],
)
def test_what_raw_scores_cannot_reflect_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="beam search cannot be combined"):
        Sampling(n=2, beam=BeamSearch(), **fields)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("name", ["default", "short"])
def test_logprobs_are_those_of_each_output(
    model: tuple[Any, Path], engine: Engine, name: str, num_top: int
) -> None:
    prompt = prompts(1, seed=num_top)[0]
    (found,) = engine.generate([prompt], sampling(name, logprobs=num_top))
    (plain,) = engine.generate([prompt], sampling(name))
    for own, other in zip(found.answers, plain.answers, strict=True):
        assert own.tokens == other.tokens
        assert other.logprobs == () and len(own.logprobs) == len(own.tokens)
        text = torch.tensor([[*prompt, *own.tokens]])
        with torch.inference_mode():
            rows_TV = model[0](text).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for token, row_V, at in zip(own.tokens, rows_TV, own.logprobs, strict=True):
            assert at.token == token
            assert at.logprob == pytest.approx(float(row_V[token]), abs=1e-3)
            assert at.rank == 1 + int((row_V > row_V[token]).sum())
            assert [t for t, _ in at.top] == row_V.topk(num_top).indices.tolist()


def test_logprobs_of_beams_have_the_limit_of_others(engine: Engine) -> None:
    with pytest.raises(BadInput, match=r"logprobs is out of range.*\[0, 20\]"):
        engine.generate([[3, 4]], sampling("default", logprobs=21))
