"""Linear rotary scaling beyond the context in the config, against transformers; dynamic refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from tests.conformance.tiny_models import BASE, VOCAB, make_model

pytestmark = pytest.mark.slow

LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}


def test_linear_scaling_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    """A prompt of three contexts: the greedy tokens of transformers, whole and in chunks."""
    trained = BASE["max_position_embeddings"]
    model = make_model("llama", tmp_path, **LINEAR)
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(VOCAB, (3 * trained,), generator=generator).tolist()
    expected: list[int] = []
    with torch.inference_mode():
        for _ in range(12):
            logits = model(torch.tensor([prompt + expected]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    settings = Settings(model=str(tmp_path), max_model_len=4 * trained, dtype="float32")
    resolved = resolve(settings)
    assert resolved.spec.max_positions == 4 * trained
    assert f"{trained:,} tokens, extended by linear" in resolved.derivations["max_model_len"]
    greedy = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    for chunk in (4096, 48):
        with Engine.from_settings(replace(settings, max_num_batched_tokens=chunk)) as engine:
            found = [list(engine.generate([prompt], greedy)[0].tokens) for _ in range(2)]
        assert found == [expected, expected], chunk  # the second time from the prefix cache


def test_context_that_scaling_does_not_reach(tmp_path: Path) -> None:
    trained = BASE["max_position_embeddings"]
    make_model("llama", tmp_path / "linear", **LINEAR)
    make_model("llama", tmp_path / "dynamic", **DYNAMIC)
    with pytest.raises(BadInput, match="exceeds the model's context"):
        resolve(Settings(model=str(tmp_path / "linear"), max_model_len=4 * trained + 1))
    with pytest.raises(BadInput, match="rotates every key again"):
        resolve(Settings(model=str(tmp_path / "dynamic"), max_model_len=trained + 1))
