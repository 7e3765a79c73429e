"""KV eviction in predictions and simulations: capped tokens read less and leave room for more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import ridgeline
from ridgeline.errors import BadInput, CannotRun, DoesNotFit
from ridgeline.plan.step_time.memory import held_tokens
from ridgeline.records import KvEviction

STREAMING = KvEviction(method="streaming", budget=1024)


@dataclass(frozen=True)
class Held:
    policy: KvEviction | None
    tokens: tuple[int, int]  # after the prompt of 4,096 tokens, and after 512 tokens of output


@pytest.mark.parametrize(
    "case",
    [
        Held(None, (4096, 4608)),
        Held(STREAMING, (1008, 1008)),
        Held(KvEviction(method="h2o", budget=0.25), (1008, 1008)),
        Held(KvEviction(method="snapkv", budget=0.25), (1024, 1536)),
        Held(KvEviction(method="adakv", budget=8192), (4096, 4608)),
    ],
)
def test_held_tokens_follow_the_policy(case: Held) -> None:
    assert tuple(held_tokens(case.policy, 4096, n) for n in (4096, 4608)) == case.tokens


def test_prediction_counts_the_capped_tokens() -> None:
    point = {"accelerator": "h100-sxm", "input_len": 6000, "output_len": 1000}
    full = ridgeline.predict("llama-3.1-8b", **point, max_concurrency=32)
    capped = ridgeline.predict(
        "llama-3.1-8b", **point, max_concurrency=32, kv_eviction_config=STREAMING
    )
    assert capped.prediction.decode_ms < 0.9 * full.prediction.decode_ms
    assert capped.prediction.kv_tokens_max == full.prediction.kv_tokens_max
    assert (capped.prediction.kv_tokens_each, full.prediction.kv_tokens_each) == (1016, 7000)
    with pytest.raises(DoesNotFit):
        ridgeline.predict("llama-3.1-8b", **point, max_concurrency=200)
    more = ridgeline.predict(
        "llama-3.1-8b",
        **point,
        max_concurrency=200,
        kv_eviction_config={"method": "streaming", "budget": 1024},
    )
    assert more.prediction.output_tok_s > full.prediction.output_tok_s


def test_prediction_refuses_what_the_engine_refuses() -> None:
    with pytest.raises(CannotRun, match="layers with a window"):
        ridgeline.predict("gemma-2-9b", accelerator="h100-sxm", kv_eviction_config=STREAMING)
    with pytest.raises(BadInput, match="too small"):
        ridgeline.predict(
            "llama-3.1-8b",
            accelerator="h100-sxm",
            kv_eviction_config=KvEviction(method="streaming", budget=8),
        )


def test_simulation_holds_more_sequences_at_once() -> None:
    load = {
        "accelerator": "l4",
        "input_len": 4000,
        "output_len": 200,
        "request_rate": 4.0,
        "num_prompts": 60,
        "quantization": "int8",
    }
    full = ridgeline.simulate("llama-3.1-8b", **load)
    capped = ridgeline.simulate("llama-3.1-8b", **load, kv_eviction_config=STREAMING)
    assert capped.summary.ttft.p50 < full.summary.ttft.p50
    assert capped.summary.output_tok_s > full.summary.output_tok_s
