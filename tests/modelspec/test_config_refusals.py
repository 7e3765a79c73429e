"""A field that is not understood is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import BadModel
from ridgeline.modelspec.families.registry import FAMILIES, spec_from_config
from ridgeline.modelspec.families.wrappers import WRAPPERS

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def refusal(family: str = "llama", **change: Any) -> str:
    with pytest.raises(BadModel) as caught:
        spec_from_config({"model_type": family, **TINY, **change}, name="mymodel")
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_field_is_named(family: str) -> None:
    assert "dual_chunk_attention_config" in refusal(family, dual_chunk_attention_config={"a": 1})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None, "architectures": ["OPTForCausalLM"]}, "OPTForCausalLM"),
        ({"model_type": None}, "architecture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": True}, "not a list of names"),
        ({"architectures": [{}]}, "not a list of names"),
        ({"model_type": []}, "architecture"),
        ({"auto_map": {"AutoModel": "m.M"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "axial"}}, "axial"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, "alpha"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "contradict",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 30}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": ["a"]}, "eos_token_id"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"sliding_window": 8}, "sliding_window"),  # Llama has none
    ],
)
def test_llama_refusals(change: dict[str, Any], named: str) -> None:
    message = refusal(**change)
    assert named in message
    assert "mymodel" in message


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma2", {"sliding_window": 8, "sliding_window_size": 9}, "sliding_window_size"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3_moe", {"num_experts_per_tok": 999}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_experts": 2**40}, "num_experts"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": 2**40}, "num_local_experts"),
        ("llama", {"num_hidden_layers": 2**40}, "at most 4096"),
        ("gemma2", {"num_hidden_layers": 4097}, "at most 4096"),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "short_factor",
        ),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("gemma3", {"text_config": None}, "text_config"),
        ("gemma3", {"text_config": {}, "auto_map": {}}, "auto_map"),
        ("gemma3", {"text_config": {}, "audio_config": {}}, "audio_config"),
        ("mistral3", {"text_config": {"model_type": "mamba"}}, "mamba"),
        ("qwen3_vl", {"text_config": {"hidden_size": 8}, "hidden_size": 9}, "hidden_size"),
    ],
)
def test_family_refusals(family: str, change: dict[str, Any], named: str) -> None:
    if family in WRAPPERS:
        with pytest.raises(BadModel, match=named):
            spec_from_config({"model_type": family, **change}, name="mymodel")
    else:
        assert named in refusal(family, **change)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None, "vision_config": None, "auto_map": None},
        {"use_sliding_window": False, "qkv_bias": False},
        {"_flash_attn_2_enabled": True, "model_max_length": 4096, "attn_dropout": 0.1},
        {"eos_token_id": -1},
        {"layer_types": ["full_attention"] * 2},
        {"quantization_config": {}},
    ],
)
def test_fields_that_say_nothing_are_left_unread(fields: dict[str, Any]) -> None:
    config = {"model_type": "llama", **TINY, "eos_token_id": None}
    plain, found = (spec_from_config(c, name="t") for c in (config, {**config, **fields}))
    assert found == plain


def test_code_published_with_ernie_is_not_needed_and_mlx_is_named() -> None:
    row = {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"]}
    code = {"AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"}
    assert spec_from_config({**row, "auto_map": code}, name="t").family == "ernie4_5"
    with pytest.raises(BadModel, match="MLX"):
        spec_from_config({**row, "quantization": {"bits": 4, "group_size": 64}}, name="t")


def test_unknown_family_names_the_nearest_and_the_fields_that_differ() -> None:
    config = {"model_type": "glm6_moe", **TINY, "head_dim": 8, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 16, "n_routed_experts": 8, "routed_scaling_factor": 2.5}
    config |= {"norm_topk_prob": True, "use_qk_norm": True, "odd_factor": 2, "odd_gate": True}
    with pytest.raises(BadModel) as caught:
        spec_from_config(config, name="mymodel")
    message = str(caught.value)
    assert "nearest known: glm4_moe" in message
    assert "has no odd_factor, odd_gate" in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen9"}, "nearest known: qwen"),
        ({"model_type": "odd_vl", "text_config": {"model_type": "gemma9"}}, "text_config: gemma"),
        ({"model_type": "bert"}, "encoder"),
        ({"model_type": "deepseek_v32"}, "sparse attention.*predict"),
        ({"model_type": "minimax_m3"}, "chosen blocks.*predict"),
        ({}, "names no architecture"),
    ],
)
def test_a_family_that_does_not_run_is_refused_in_one_line(config: Any, words: str) -> None:
    with pytest.raises(BadModel, match=words) as caught:
        spec_from_config({**TINY, **config}, name="t")
    assert len(str(caught.value)) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.mark.slow
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    key=st.sampled_from(sorted(set().union(*(row.understood for row in FAMILIES.values())))),
    value=json_values,
)
def test_any_json_value_gives_a_spec_or_a_clear_error(family: str, key: str, value: Any) -> None:
    try:
        spec_from_config({"model_type": family, **TINY, key: value}, name="x")
    except BadModel as error:
        assert "config.json of x" in str(error)
