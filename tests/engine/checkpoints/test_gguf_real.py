"""Published GGUF files: what llama.cpp answers, frozen by scripts/gguf_parity.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import ridgeline
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import local_path

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The model's file and the frozen answers. Gemma 3's file is not downloaded."""
    if request.param == "gemma3":
        model = os.environ.get("RIDGELINE_GEMMA_GGUF", "")
        if not model:
            pytest.skip("RIDGELINE_GEMMA_GGUF names no file of Gemma 3 270M in Q4_K_M")
    else:
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RIDGELINE_CACHE", os.environ["RIDGELINE_TEST_USER_CACHE"])
                model = str(local_path("smollm2"))
        except BadModel:
            pytest.skip("smollm2 is not downloaded: run ridgeline pull smollm2")
    vectors = (HERE / f"{request.param}_vectors.json").read_text(encoding="utf-8")
    return model, json.loads(vectors)


def test_texts_have_the_ids_of_llama_cpp(case: tuple[str, dict[str, Any]]) -> None:
    model, vectors = case
    tokenizer = load_tokenizer(model)
    assert [tokenizer.encode(text) for text in vectors["texts"]] == vectors["tokens"]
    assert sorted(load_spec(model).eos_token_ids) == vectors["ends"]


def test_greedy_answers_are_those_of_llama_cpp(case: tuple[str, dict[str, Any]]) -> None:
    """With float32 activations on both sides; no token of these answers is nearly a tie."""
    model, vectors = case
    count = max(map(len, vectors["answers"]))
    sampling = ridgeline.Sampling(max_tokens=count, temperature=0.0)
    with ridgeline.Engine.open(
        model, activations="float32", dtype="float32", max_model_len=512
    ) as engine:
        found = engine.generate(vectors["prompts"], sampling)
    assert [list(each.tokens) for each in found] == vectors["answers"]
