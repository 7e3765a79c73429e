"""The whole engine on a GPU against the engine on the CPU."""

from __future__ import annotations

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling

PROMPTS = ["The ridge", "def main():", "Once upon a time there was", "1, 2, 3, 4,"]
GREEDY = Sampling(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=2)
NEAR_TIE = 1e-3  # nats between the two most likely tokens where rounding may decide


def check_but_for_near_ties(ours: Engine, reference: Engine) -> None:
    """Equal tokens up to the first place where the reference itself nearly ties."""
    found = ours.generate(PROMPTS, GREEDY)
    wanted = reference.generate(PROMPTS, GREEDY)
    for own, want in zip(found, wanted, strict=True):
        tokens, expected = own.tokens, want.tokens
        pairs = zip(tokens, expected, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            (_, best), (_, second) = want.answers[0].logprobs[first].top[:2]
            assert best - second < NEAR_TIE, (first, tokens, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "torch", "layer_backend": "torch"},
        {"attention_backend": "tables", "layer_backend": "torch"},
        {"speculative_config": {"method": "ngram"}},
        {"async_scheduling": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
    ],
)
def test_greedy_tokens_equal_those_of_the_cpu(settings: dict[str, object]) -> None:
    common = {"max_model_len": 512, "dtype": "float32"}
    with (
        Engine.open("demo", device="cuda", **common, **settings) as ours,  # type: ignore[arg-type]
        Engine.open("demo", device="cpu", **common) as reference,  # type: ignore[arg-type]
    ):
        check_but_for_near_ties(ours, reference)


def test_an_engine_on_cuda_says_what_it_runs() -> None:
    with Engine.open("demo", device="cuda", max_model_len=512) as engine:
        engine.generate(PROMPTS, Sampling(temperature=0.8, max_tokens=8))
        info, counters = engine.info, engine.counters()
    assert info.device == "cuda"
    assert "graph" in info.derivations["decode_graphs"]
    assert counters["num_graph_replays"] > 0 and counters["num_graphs"] > 0
