"""Latent attention, recurrent states and adapters in CUDA graphs, against the engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.engine import Engine
from ridgeline.records import Sampling
from tests.conformance.tiny_models import VOCAB, make_model
from tests.engine.adapters.make_adapter import LLAMA, save_adapter

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
NEAR_TIE = 1e-3  # nats between the two most likely tokens where rounding may decide
SIZES = {"dtype": "float32", "block_size": 16, "max_model_len": 64, "max_num_seqs": 4}


def check(path: Path, names: list[str], **settings: Any) -> None:
    """Equal tokens up to the first near tie; decode steps come from graphs."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (5, 11, 3)]
    answers = []
    for device in ("cuda", "cpu"):
        with Engine.open(str(path), device=device, **SIZES, **settings) as engine:
            answers.append(engine.generate(prompts, GREEDY, names))
            counters, why = engine.counters(), engine.info.derivations
        if device == "cuda":
            assert counters["num_graph_replays"] > 0, why["decode_graphs"]
    for own, want in zip(*answers, strict=True):
        pairs = zip(own.tokens, want.tokens, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            (_, best), (_, second) = want.answers[0].logprobs[first].top[:2]
            assert best - second < NEAR_TIE, (first, own.tokens, want.tokens)


@pytest.mark.parametrize("family", ["youtu", "deepseek-v2-greedy", "qwen3.5"])
def test_models_with_latent_rows_or_states(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    check(tmp_path, ["", "", ""])


def test_rows_of_several_adapters(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "base")
    for seed, name in enumerate(("first", "second")):
        save_adapter(tmp_path / name, tmp_path / "base", list(LLAMA), seed=seed)
    modules = tuple(f"{name}={tmp_path / name}" for name in ("first", "second"))
    check(
        tmp_path / "base",
        ["first", "", "second"],
        enable_lora=True,
        lora_modules=modules,
        max_lora_rank=4,
    )
