"""Prefill and decode on two engines: windows, quantised KV caches, speculation, faults."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling
from tests.engine.kv_transfer.random_faults import run_with_faults
from tests.engine.kv_transfer.two_engines import (
    SETTINGS,
    client_of,
    complete,
    fallbacks,
    hand_over,
    two_engines,
)

pytestmark = pytest.mark.slow

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"kv_cache_dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int4": {"kv_cache_dtype": "int4"},
    "speculation": {"speculative_config": SPECULATION},
    "int8-speculation": {"kv_cache_dtype": "int8", "speculative_config": SPECULATION},
}


def compare(model: str, lengths: list[int], vocabulary: int, **settings: Any) -> None:
    """Greedy and sampled answers of two engines and of one; every full block was fetched."""
    rng = random.Random(9)
    prompts = [[rng.randrange(5, vocabulary) for _ in range(length)] for length in lengths]
    samplings = [
        Sampling(temperature=rng.choice((0.0, 0.8)), seed=4, max_tokens=20, ignore_eos=True)
        for _ in prompts
    ]
    with (
        Engine.open(model, **SETTINGS | settings) as alone,
        two_engines(model, **settings) as (prefill, decode),
    ):

        async def handed_over() -> list[Any]:
            pairs = zip(prompts, samplings, strict=True)
            return list(await asyncio.gather(*[hand_over(prefill, decode, *p) for p in pairs]))

        expected = [
            asyncio.run(complete(alone, prompt, sampling))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        assert asyncio.run(handed_over()) == expected
        assert client_of(decode).num_blocks > 0
        assert fallbacks(decode) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_caches_and_speculation(kind: str) -> None:
    compare("demo", [40, 100, 161, 233], 3000, **KINDS[kind])


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.conformance.tiny_models import make_model

    directory: Path = tmp_path_factory.mktemp("gemma3")
    make_model("gemma3", directory, max_position_embeddings=512)
    return str(directory)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4"])  # heads of 8
def test_windowed_layers(gemma3: str, kind: str) -> None:
    compare(gemma3, [20, 60, 97, 200], 60, **KINDS[kind])


@pytest.mark.parametrize("settings", [{}, KINDS["int8"]], ids=["float32", "int8"])
def test_faults_of_the_prefill_server_change_no_token(settings: dict[str, Any]) -> None:
    result = run_with_faults(40, 3, share=0.5, **settings)
    assert result["wrong"] == 0 and result["open_leases"] == 0
    assert {"checksum", "lost", "prefill_failed"} & set(result["fallbacks"])
