"""Special tokens of GGUF files by llama.cpp's rules: ends of an answer, BOS and EOS defaults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ridgeline.compress.writers.gguf_tokenizer import tokenizer_metadata
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.engine.tokenization.gguf import chat_templates, template_names, tokenizer_of
from ridgeline.engine.tokenization.gguf_patterns import PRE_TOKENIZERS
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.gguf_header import Gguf, read_gguf
from ridgeline.modelspec.checkpoints.gguf_tokens import end_of_generation, token_types
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path

BYTES = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]


def vocabulary(*special: str, pre: str = "gpt-2", kind: int = 3, **more: Any) -> dict[str, Any]:
    """Single characters, then `special` tokens, which begin at id 96."""
    assert len(BYTES) == 96
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*BYTES, *special],
        "tokenizer.ggml.token_type": [1] * 96 + [kind] * len(special),
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize(
    ("special", "named", "ends"),
    [
        (("<|endoftext|>", "<|im_end|>"), {"eos_token_id": 97}, (97, 96)),
        (("<s>", "<|eot_id|>", "<|eom_id|>"), {"eos_token_id": 96}, (96, 97, 98)),
        (("<a>", "<b>", "<c>"), {"eot_token_id": 97, "eom_token_id": 98}, (97, 98)),
        (("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), {}, (96, 97, 98)),
        (("<|fim_pad|>", "<pad>"), {"fim_pad_token_id": 97}, (97,)),
        (("<|end|>", "<|return|>", "<|call|>"), {}, (97, 98)),
        (("<|end|>", "<|user|>"), {}, (96,)),
        (("</s>", "<|tool_response>"), {}, (97,)),
        (("<plain>",), {"eos_token_id": 1000}, ()),
    ],
)
def test_end_of_turn_tokens_end_an_answer(
    special: tuple[str, ...], named: dict[str, int], ends: tuple[int, ...]
) -> None:
    assert end_of_generation(vocabulary(*special, **named)) == ends


def test_end_of_turn_is_special_whatever_its_type() -> None:
    metadata = vocabulary("<|im_end|>", "<|channel|>", kind=1)
    assert token_types(metadata)[96:] == [3, 4]
    inner = tokenizer_of(metadata)
    assert inner.encode("a<|im_end|>").ids[-1] == 96
    assert inner.decode([64, 96, 97]) == "a<|channel|>"


@pytest.mark.parametrize(
    ("pre", "more", "ids"),
    [
        ("llama-bpe", {}, [96, 64]),
        ("tekken", {}, [96, 64]),
        ("llama-bpe", {"add_bos_token": False}, [64]),
        ("qwen2", {}, [64]),
        ("qwen2", {"add_bos_token": True}, [96, 64]),
        ("qwen2", {"add_eos_token": True}, [64, 97]),
        ("llama-bpe", {"add_eos_token": True}, [96, 64, 97]),
    ],
)
def test_bos_and_eos_follow_the_file(pre: str, more: dict[str, Any], ids: list[int]) -> None:
    metadata = vocabulary("<bos>", "<eos>", pre=pre, bos_token_id=96, eos_token_id=97, **more)
    inner = tokenizer_of(metadata)
    assert inner.encode("a").ids == ids
    assert inner.encode("a", add_special_tokens=False).ids == [64]
    assert template_names(metadata) == {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_missing_ids_default_to_control_tokens_only() -> None:
    """llama.cpp takes ids 1 and 2 of a SentencePiece vocabulary, and 11 of a GPT-2 one."""
    pieces = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "<end>", "▁"],
        "tokenizer.ggml.scores": [0.0] * 4,
        "tokenizer.ggml.token_type": [2, 3, 3, 1],
    }
    assert end_of_generation(pieces) == (2,)
    assert tokenizer_of(pieces).encode(" ").ids[0] == 1
    assert end_of_generation(vocabulary("<other>")) == ()  # 11 is a character here


def test_phi_3_strips_spaces_after_its_special_tokens() -> None:
    metadata = vocabulary("<|end|>", "<|endoftext|>") | {"general.name": "Phi-3 Mini"}
    inner = tokenizer_of(metadata)
    assert inner.encode("<|end|>  a").ids == [96, 64]
    assert inner.encode("<|endoftext|> a").ids == [97, 94, 64]


VECTORS = json.loads(
    Path(__file__).with_name("gguf_pre_tokenizers.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    metadata = tokenizer_metadata(model_path("demo"), load_spec("demo"))
    kept = {key: value for key, value in metadata.items() if "add_" not in key}
    return kept | {"tokenizer.ggml.bos_token_id": 1}


@pytest.mark.parametrize("name", VECTORS["pre_tokenizers"])
def test_pre_tokenizers_give_the_ids_of_llama_cpp(name: str, demo: dict[str, Any]) -> None:
    """Vectors and a longer comparison: scripts/gguf_vocab_vectors.py."""
    inner = tokenizer_of(demo | {"tokenizer.ggml.pre": name})
    chosen = zip(VECTORS["encodings"], VECTORS["pre_tokenizers"][name], strict=True)
    expected = [encodings[i] for encodings, i in chosen]
    assert [inner.encode(text).ids for text in VECTORS["texts"]] == expected


def test_every_byte_level_pre_tokenizer_has_vectors() -> None:
    names = {name for name, words in PRE_TOKENIZERS.items() if words.byte_level}
    assert names == VECTORS["pre_tokenizers"].keys()


@pytest.mark.skipif(
    "RIDGELINE_GGUF_VOCABS" not in os.environ,
    reason="RIDGELINE_GGUF_VOCABS names no folder of llama.cpp's models/ggml-vocab-*.gguf",
)
def test_llama_cpp_vocabularies_give_the_same_ids() -> None:
    """Every vocabulary with a .inp and .out file next to it, but for encoders' (bert, t5)."""
    compared = 0
    for path in sorted(Path(os.environ["RIDGELINE_GGUF_VOCABS"]).glob("ggml-vocab-*.gguf")):
        questions, answers = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
        metadata = read_gguf(str(path)).metadata
        if not questions.is_file() or metadata["tokenizer.ggml.model"] in ("bert", "t5"):
            continue
        texts = questions.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        expected = [[int(i) for i in line.split()] for line in answers.read_text().split("\n")]
        inner = tokenizer_of(metadata)
        for text, ids in zip(texts, expected, strict=False):
            assert inner.encode(text, add_special_tokens=False).ids == ids, (path.name, text)
        compared += 1
    assert compared


def test_named_chat_templates_are_read() -> None:
    metadata = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "of tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert chat_templates(metadata) == {"default": "plain", "tool_use": "of tools"}


@pytest.mark.parametrize("metadata", [{"pre": "unheard-of"}, {"model": "bert"}])
def test_unknown_tokenizer_leaves_token_ids(
    metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    file = Gguf(Path("m.gguf"), vocabulary() | keys, {})
    monkeypatch.setattr("ridgeline.engine.tokenization.tokenizer.read_gguf", lambda _: file)
    tokenizer = load_tokenizer("m.gguf")
    with pytest.raises(BadInput, match=next(iter(metadata.values()))):
        tokenizer.encode("text")
