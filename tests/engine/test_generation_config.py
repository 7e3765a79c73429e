"""Sampling defaults of a model's generation_config.json, under vLLM's `--generation-config`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.engine.engine import Engine
from ridgeline.engine.generation_config import read_sampling_defaults
from ridgeline.errors import BadInput, BadModel
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.records import Sampling, SamplingDefaults
from ridgeline.serve.openai.chat import chat_output_format
from ridgeline.serve.openai.sampling_params import chat_sampling, completion_sampling
from ridgeline.serve.openai.schemas import ChatCompletionRequest, CompletionRequest
from tests.serve.fake_engine import CharTokenizer

RECOMMENDED = {
    "do_sample": True,
    "eos_token_id": [0, 4],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
}
DEFAULTS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=7
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    shutil.copytree(model_path("demo"), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return str(tmp_path / "model")


def test_auto_reads_the_model_and_vllm_reads_nothing(model: str) -> None:
    assert read_sampling_defaults(model) == DEFAULTS
    assert read_sampling_defaults(model, "vllm") == SamplingDefaults()
    assert read_sampling_defaults("dummy:llama-3.2-1b") == SamplingDefaults()
    assert str(SamplingDefaults()) == "none"
    assert "temperature 0.6, top_k 20" in str(DEFAULTS)


def test_a_path_names_another_file_or_folder(model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.1, "top_k": null}')
    for path in (other, other / "generation_config.json"):
        assert read_sampling_defaults(model, str(path)) == SamplingDefaults(temperature=0.1)
    with pytest.raises(BadInput, match="neither auto, vllm nor a place that holds the file"):
        read_sampling_defaults(model, str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("top_p", 0), ("top_p", "high"), ("top_k", 2.5), ("max_new_tokens", 0)],
)
def test_default_out_of_range_names_itself_and_the_way_out(
    model: str, key: str, value: Any
) -> None:
    (Path(model) / "generation_config.json").write_text(json.dumps({key: value}))
    name = "max_tokens" if key == "max_new_tokens" else key
    with pytest.raises(BadModel, match=rf"{name}.*--generation-config vllm"):
        resolve(Settings(model=model))
    assert resolve(Settings(model=model, generation_config="vllm")).default_sampling.top_p is None


def test_request_values_win_over_the_defaults() -> None:
    plain = completion_sampling(CompletionRequest(prompt="a"), DEFAULTS)
    assert plain == DEFAULTS.fill(max_tokens=16)  # a completion's own default, as in vLLM
    assert (plain.temperature, plain.top_k, plain.repetition_penalty) == (0.6, 20, 1.05)
    own = CompletionRequest(prompt="a", temperature=0, top_k=0, top_p=1, max_tokens=99)
    sampling = completion_sampling(own, DEFAULTS)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 1)
    assert (sampling.max_tokens, sampling.repetition_penalty) == (99, 1.05)


def test_chat_without_a_limit_takes_max_new_tokens() -> None:
    tokenizer = CharTokenizer(has_template=True)

    def sampling(defaults: SamplingDefaults, **fields: Any) -> Sampling:
        messages = [{"role": "user", "content": "a"}]
        chat = ChatCompletionRequest.model_validate({"messages": messages, **fields})
        return chat_sampling(chat, chat_output_format(chat, ServerOptions()), tokenizer, defaults)

    assert sampling(DEFAULTS, top_p=None) == DEFAULTS.fill(max_tokens=7)
    assert sampling(SamplingDefaults()).max_tokens is None
    assert sampling(DEFAULTS, max_tokens=50).max_tokens == 50


def test_engine_uses_the_defaults_where_no_sampling_is_given(model: str) -> None:
    """`top_k` 1 leaves one token: the answer is greedy whatever the seed."""
    path = Path(model) / "generation_config.json"
    path.write_text('{"top_k": 1, "temperature": 5.0}')
    greedy = Sampling(temperature=0.0)
    for seed in (1, 2):
        with Engine.open(model, seed=seed, max_num_seqs=2) as engine:
            assert engine.default_sampling == SamplingDefaults(top_k=1, temperature=5.0)
            assert engine.resolved.derivations["generation_config"].endswith("top_k 1")
            own, expected = engine.generate(["def f("]), engine.generate(["def f("], greedy)
            assert own[0].tokens == expected[0].tokens


def test_smollm2_is_sampled_as_its_publisher_recommends() -> None:
    assert read_sampling_defaults("smollm2") == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert read_sampling_defaults("smollm2", "vllm") == SamplingDefaults()
