"""A tiny Llama that recites: its next token depends on the last one alone.

A prompt that ends with a script's first token makes the real engine and the real server write that
script, token by token, so that readers and stop strings are tested on exact text with exact token
borders.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ messages[-1].content[:3] }}{% endif %}"
)
"""The prompt of a chat ends with the first three characters of its last message: a script's name"""


def script_name(index: int) -> str:
    """The text of the token that starts a script."""
    return f"#{index:02d}"


def write_script_model(
    folder: Path,
    scripts: Sequence[str],
    *,
    special_tokens: Sequence[str] = (),
    template: str = TEMPLATE,
    after: Mapping[str, str] | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint that recites `scripts[i]`, then the end of sequence, after `#0i`.

    `special_tokens` that occur in a script are single tokens, which text skips by default.
    `after[mark]` is recited after the special token `mark`.
    """
    starts = {script_name(index): text for index, text in enumerate(scripts)} | dict(after or {})
    special = [END, "<|im_start|>", *special_tokens]
    names = [script_name(index) for index in range(len(scripts))]
    used: set[str] = set()
    pieces = [_pieces(text, special, used, random.Random(seed)) for text in starts.values()]
    byte_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    written = [_as_bytes(piece) for script in pieces for piece in script if piece not in special]
    vocab = {text: index for index, text in enumerate(dict.fromkeys([*byte_alphabet, *written]))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    ids = {text: tokenizer.token_to_id(text) for text in [*special, *names, *vocab]}
    following: dict[int, int] = {}
    for name, script in zip(starts, pieces, strict=True):
        chain = [ids[name], *(ids[p] if p in special else ids[_as_bytes(p)] for p in script)]
        following |= zip(chain, [*chain[1:], ids[END]], strict=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_weights(folder, tokenizer.get_vocab_size(), following, ids[END], dict(config or {}))
    settings = {"eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _pieces(text: str, special: Sequence[str], used: set[str], rng: random.Random) -> list[str]:
    """The text in pieces that occur nowhere else: a piece determines what follows it."""
    pieces: list[str] = []
    for section in re.split(f"({'|'.join(map(re.escape, special))})", text):
        if section in special:
            assert section not in used, f"{section} occurs twice: what follows is ambiguous"
            pieces.append(section)
        elif section:
            pieces += _split_unused(section, used, rng)
        used.update(pieces)
    return pieces


def _split_unused(text: str, used: set[str], rng: random.Random) -> list[str]:
    for largest in range(4, len(text) + 8):
        pieces, rest = list[str](), text
        while rest:
            size = rng.randint(1, largest)
            pieces.append(rest[:size])
            rest = rest[size:]
        if len({*pieces} - used) == len(pieces):
            return pieces
    raise AssertionError(f"no unused pieces make {text!r}")


def _as_bytes(text: str) -> str:
    """A piece in the characters of byte-level vocabularies."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in pre.pre_tokenize_str(text))


def _write_weights(
    folder: Path, vocab_size: int, following: Mapping[int, int], end: int, config: dict[str, Any]
) -> None:
    """Attention and MLP are zero; the head maps the embedding of a token to its follower."""
    width = -(-vocab_size // 32) * 32
    embedding = torch.eye(vocab_size, width)
    head = torch.zeros(vocab_size, width)
    for token in range(vocab_size):
        head[following.get(token, end), token] = 4.0
    zeros, layer = torch.zeros(width, width), "model.layers.0."
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(width),
        f"{layer}input_layernorm.weight": torch.ones(width),
        f"{layer}post_attention_layernorm.weight": torch.ones(width),
        f"{layer}mlp.gate_proj.weight": torch.zeros(32, width),
        f"{layer}mlp.up_proj.weight": torch.zeros(32, width),
        f"{layer}mlp.down_proj.weight": torch.zeros(width, 32),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weights[f"{layer}self_attn.{name}.weight"] = zeros.clone()
    save_file(weights, folder / "model.safetensors")
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32, "head_dim": 32, "vocab_size": vocab_size,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
        "eos_token_id": end, "bos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described | config))
