"""A random Llama of four layers with the demo's tokenizer, as a folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.modelspec.checkpoints.locate import model_path

CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES = {
    "self_attn.q_proj": (48, 48),
    "self_attn.k_proj": (24, 48),
    "self_attn.v_proj": (24, 48),
    "self_attn.o_proj": (48, 48),
    "mlp.gate_proj": (128, 48),
    "mlp.up_proj": (128, 48),
    "mlp.down_proj": (48, 128),
}


def random_tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=random) / math.sqrt(shape[-1])
        return values.bfloat16()

    ones = torch.ones(48, dtype=torch.bfloat16)
    found = {"model.embed_tokens.weight": normal(4096, 48), "model.norm.weight": ones.clone()}
    for layer in range(4):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": normal(*shape) for name, shape in SHAPES.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = ones.clone()
    return found


def write(folder: Path, tensors: dict[str, Tensor], **changes: object) -> Path:
    """A model folder with the demo's tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_path("demo") / name).read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder
