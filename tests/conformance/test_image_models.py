"""The text of an image model gives the logits that transformers computes of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.conformance.tiny_models import BASE, VOCAB, load_ours, randomise

pytestmark = pytest.mark.slow

TOKENS = [3, 17, 42, 5, 66, 9, 28, 1, 50]
CLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 7, "head_dim": 6, "logit_scale": 0.25}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", {"model_type": "llama"}, CLIP),
    "glm4v": (
        "glm4v",
        {"hidden_size": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
         "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
         "out_hidden_size": 32, "patch_size": 14, "image_size": 28},
    ),
    "llava-mistral": ("llava", {"model_type": "mistral", "head_dim": 8}, CLIP),
    "llava_next": ("llava_next", {"model_type": "llama"}, CLIP),
    "llava_onevision": ("llava_onevision", {"model_type": "qwen2"}, CLIP),
    "internvl": ("internvl", {"model_type": "qwen3", "head_dim": 8},
                 CLIP | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "internvl-tied": ("internvl", {"model_type": "qwen2", "tie_word_embeddings": True},
                      CLIP | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "idefics3": ("idefics3", {"model_type": "llama"}, CLIP),
    "smolvlm": ("smolvlm", {"model_type": "llama", "tie_word_embeddings": True}, CLIP),
    "aya_vision": ("aya_vision", {"model_type": "cohere2", **WINDOWS}, CLIP),
    "cohere2_vision": ("cohere2_vision", {"model_type": "cohere2", **WINDOWS}, CLIP),
    "kimi_k25": ("kimi_k25", {"model_type": "deepseek_v3", **LATENT}, CLIP),
    "lighton_ocr": ("lighton_ocr", {"model_type": "qwen3", "head_dim": 8}, CLIP),
}  # fmt: skip


def use_published_names(file: Path) -> None:
    """transformers 5.24 saves a Kimi K2.5's text layers under the names of its image blocks."""
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_text_gives_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model_type, text, vision = MODELS[name]
    text = {**BASE, **text}
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        pad_token_id=0,
    )
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    if name == "kimi_k25":
        use_published_names(tmp_path / "model.safetensors")
    ours = load_ours(tmp_path)
    assert ours.runner.decoder.spec.vocab_size == VOCAB
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0].double()
    # transformers leaves Cohere's scale out in its image models, unlike in the text model
    theirs = torch.log_softmax(logits * text.get("logit_scale", 1.0), -1)
    got = torch.log_softmax(ours.paged_logits(TOKENS, [5, 4], [4, 2, 9]).double(), -1)
    assert float(theirs.std()) > 0.1
    assert float((got - theirs).abs().max()) < 1e-4
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == model_type
