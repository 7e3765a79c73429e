"""Layers that give the blocks behind their window back compute the same as layers that keep them.

The CPU's kernels add keys in tiles at fixed positions, so the tokens are equal without exception:
over random schedules with chunks, prefix hits, preemption, forks and drafts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.errors import DoesNotFit
from ridgeline.modelspec.cost.kv_cache import kv_bytes_per_token
from ridgeline.modelspec.cost.kv_layout import kv_layout
from ridgeline.records import Request, Sampling
from tests.conformance.tiny_models import make_model
from tests.invariants.serving import Model, Schedule, serve

CONTEXT = 800  # beyond the chunks of 512 keys in which the kernels add


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "mistral", "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, path, max_position_embeddings=CONTEXT)
    return Model.load(str(path), "native")


def random_requests(rng: random.Random) -> list[Request]:
    """Long and short texts, of which some begin alike and some are forked."""
    head = [rng.randint(3, 62) for _ in range(400)]
    requests = []
    for i in range(rng.randint(2, 6)):
        shared = rng.choice((0, 150, 400))
        prompt = head[:shared] + [rng.randint(3, 62) for _ in range(rng.randint(1, 200))]
        sampling = Sampling(
            temperature=rng.choice((0.0, 1.3)),
            seed=i,
            n=rng.choice((1, 1, 3)),
            max_tokens=rng.randint(1, 90),
            ignore_eos=True,
        )
        requests.append(Request(id=f"{i}", prompt=tuple(prompt), sampling=sampling, arrival_s=0.0))
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_reclaiming_blocks_changes_no_token(model: Model, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    requests = random_requests(rng)
    schedule = Schedule(
        num_blocks=rng.choice((60, 90, 300)) if seed % 2 else 50,
        block_size=16,
        max_num_batched_tokens=rng.choice((24, 100, 512)),
        prefix=rng.random() < 0.7,
        arrives=tuple(sorted(rng.choices(range(40), k=len(requests)))),
        rounds=2,
        drafts=rng.choice(("", "ngram", "suffix")),
        depth=4,
        max_model_len=CONTEXT,
    )
    kept = serve(replace(model, gives_back=False), requests, replace(schedule, num_blocks=600))
    given_back = serve(model, requests, schedule)
    assert [served.answers for served in given_back] == [served.answers for served in kept]


def test_engine_serves_a_long_text_that_only_fits_with_windows(tmp_path: Path) -> None:
    make_model("gemma3", tmp_path, max_position_embeddings=4096)
    settings = Settings(model=str(tmp_path), max_model_len=2048, max_num_batched_tokens=64)
    spec = resolve(settings).spec
    layout = kv_layout(spec)
    needed = layout.max_blocks(2048, 16, 64) * layout.block_bytes(16)
    assert needed < 0.5 * 2048 * kv_bytes_per_token(spec)
    with pytest.raises(DoesNotFit):
        resolve(msgspec.structs.replace(settings, kv_cache_memory_bytes=needed - 1))
    exact = msgspec.structs.replace(settings, kv_cache_memory_bytes=needed)
    assert "keep a window only" in resolve(exact).derivations["num_blocks"]
    prompt, sampling = list(range(3, 60)) * 35, Sampling(temperature=0.0, max_tokens=50)
    with Engine.from_settings(exact) as small, Engine.from_settings(settings) as large:
        assert small.generate([prompt], sampling) == large.generate([prompt], sampling)
