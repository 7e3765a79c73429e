"""Rotary frequencies against transformers, every kind, old keys and new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.families.shapes import planning_config
from ridgeline.modelspec.model import RopeSpec
from ridgeline.modelspec.rope import attention_factor, depends_on_length, inv_freq

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
LONG = {
    "short_factor": [1.0 + i / 10 for i in range(32)],
    "long_factor": [1.5 + i for i in range(32)],
}
LLAMA_KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"type": "yarn", "factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512, **LONG},
]


def rope_of(config: dict[str, Any], family: str = "llama") -> RopeSpec:
    return spec_from_config({"model_type": family, **config}, name="x").layers[0].attention.rope


def assert_equal(rope: RopeSpec, theirs: Any, factor: float, seq_len: int) -> None:
    ours = torch.tensor(inv_freq(rope, seq_len))
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor)


@pytest.mark.parametrize("scaling", LLAMA_KINDS, ids=lambda s: s.get("rope_type", s.get("type")))
@pytest.mark.parametrize("seq_len", [1, 4096, 10_000])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_llama_kinds(scaling: dict[str, Any], seq_len: int, theta: float) -> None:
    base = {**BASE, "rope_theta": theta}
    config = LlamaConfig(**base, rope_scaling=dict(scaling))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    assert_equal(rope_of({**base, "rope_scaling": scaling}), theirs, factor, seq_len)
    new_style = {key: value for key, value in base.items() if key != "rope_theta"}
    new_style["rope_parameters"] = config.rope_parameters
    assert_equal(rope_of(new_style), theirs, factor, seq_len)


@pytest.mark.parametrize("name", ["longrope", "yarn"])
@pytest.mark.parametrize("seq_len", [100, 9000])
def test_phi3_longrope_takes_its_factor_from_the_positions(name: str, seq_len: int) -> None:
    config: dict[str, Any] = {
        **BASE,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": name,
            "short_factor": LONG["short_factor"][:24],
            "long_factor": LONG["long_factor"][:24],
        },
    }
    theirs = Phi3RotaryEmbedding(Phi3Config(**config, pad_token_id=0))
    theirs(torch.zeros(1), torch.tensor([[seq_len - 1]]))
    rope = rope_of(config, "phi3")
    assert rope.dim == 48
    config["rope_scaling"]["type"] = "su"  # what the first Phi-3 called it
    assert rope_of(config, "phi3") == rope
    assert_equal(rope, theirs.inv_freq, theirs.attention_scaling, seq_len)


def test_only_two_kinds_depend_on_the_length() -> None:
    for scaling in LLAMA_KINDS:
        rope = rope_of({**BASE, "rope_scaling": scaling})
        assert depends_on_length(rope) == (inv_freq(rope, 1) != inv_freq(rope, 100_000))


def test_mixtral_has_its_own_default_theta() -> None:
    assert rope_of({"num_hidden_layers": 1}, "mixtral").theta == 1_000_000.0


def test_theta_inside_rope_parameters_wins() -> None:
    rope = rope_of({**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0e5}})
    assert rope.theta == 5.0e5


def test_phi3_top_level_positions_win() -> None:
    config: dict[str, Any] = {
        **BASE,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 2048,
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096, **LONG},
    }
    rope = rope_of(config, "phi3")  # before transformers writes into the dictionary
    theirs = Phi3RotaryEmbedding(Phi3Config(**config, pad_token_id=0))
    theirs(torch.zeros(1), torch.tensor([[2999]]))
    assert_equal(rope, theirs.inv_freq, theirs.attention_scaling, 3000)


def test_yarn_extends_the_context() -> None:
    """As the cards of Qwen 2.5 and 3 say: `rope_scaling` is added, and nothing else is changed."""
    config = dict(planning_config("qwen3-8b")) | {"max_position_embeddings": 32768}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_from_config(config, name="x").max_positions == 32768
    scaled = {**config, "rope_scaling": yarn}
    assert spec_from_config(scaled, name="x").max_positions == 131072
    published = {**scaled, "max_position_embeddings": 262144}
    assert spec_from_config(published, name="x").max_positions == 262144
