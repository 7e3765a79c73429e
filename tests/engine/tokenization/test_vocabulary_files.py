"""Tokenizers of directories without a tokenizer.json.

SentencePiece's answers in sentencepiece_models.json are frozen by scripts/sentencepiece_vectors.py;
transformers is the oracle for vocab.json with merges.txt.
"""

from __future__ import annotations

import base64
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from ridgeline.engine.engine import Engine
from ridgeline.engine.tokenization import HfTokenizer, NoTokenizer, check_tokenizer, load_tokenizer
from ridgeline.errors import BadInput, BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.checkpoints.sentencepiece_model import read_sentencepiece
from scripts.odd_strings import odd_strings

VECTORS: dict[str, Any] = json.loads(
    Path(__file__).with_name("sentencepiece_models.json").read_text(encoding="utf-8")
)


def sentencepiece_folder(path: Path, name: str, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(base64.b64decode(VECTORS[name]["model"]))
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def encode(path: Path, text: str, **options: Any) -> list[int]:
    return load_tokenizer(str(path)).encode(text, **options)


@pytest.mark.parametrize("name", VECTORS)
def test_sentencepiece_models_encode_as_sentencepiece(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(sentencepiece_folder(tmp_path, name)))
    for text, ids in VECTORS[name]["texts"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)


@pytest.mark.parametrize("name", ["bpe-llama", "bpe-gemma"])
def test_decoding_restores_the_text(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(sentencepiece_folder(tmp_path, name)))
    for text in ("Hello  world", " x\n\n  y", "a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_and_eos_are_those_of_the_tokenizer_config(tmp_path: Path) -> None:
    path = sentencepiece_folder(tmp_path, "bpe-llama")
    plain = encode(path, "Hello", add_special_tokens=False)
    assert encode(path, "Hello") == [1, *plain]
    sentencepiece_folder(path, "bpe-llama", add_bos_token=False, add_eos_token=True)
    assert encode(path, "Hello") == [*plain, 2]


def test_special_tokens_in_a_text_and_added_tokens(tmp_path: Path) -> None:
    count = len(
        read_sentencepiece(sentencepiece_folder(tmp_path, "bpe-llama") / "tokenizer.model").pieces
    )
    added = {str(count + 1): {"content": "<|im_end|>", "special": True}}
    path = sentencepiece_folder(
        tmp_path, "bpe-llama", eos_token="<|im_end|>", added_tokens_decoder=added, legacy=True
    )
    hello = encode(path, "Hello", add_special_tokens=False)
    assert encode(path, "<s>Hello<|im_end|>", add_special_tokens=False) == [1, *hello, count + 1]
    sentencepiece_folder(
        tmp_path, "bpe-llama", eos_token="<|im_end|>", added_tokens_decoder=added, legacy=False
    )
    assert encode(path, "<s>Hello", add_special_tokens=False) != [1, *hello]  # no blank after <s>


def test_user_defined_pieces_stay_whole_next_to_words(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(sentencepiece_folder(tmp_path, "bpe-gemma")))
    assert isinstance(tokenizer, HfTokenizer)
    pieces = [tokenizer.inner.id_to_token(i) for i in tokenizer.encode("a<table>b\n\n\nc   d")]
    assert pieces == ["<s>", "a", "<table>", "b", "\n\n", "\n", "c", "▁▁▁", "d"]


@pytest.mark.parametrize("damage", [b"", b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\x18\x02"])
def test_damaged_sentencepiece_model_is_an_error(damage: bytes, tmp_path: Path) -> None:
    path = sentencepiece_folder(tmp_path, "bpe-llama")
    (path / "tokenizer.model").write_bytes(damage)
    with pytest.raises(BadModel, match="not a SentencePiece model"):
        load_tokenizer(str(path))


def byte_pair_folder(path: Path, **config: Any) -> Path:
    """The demo model's vocabulary as vocab.json and merges.txt, with two added tokens."""
    source = json.loads((model_path("demo") / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = source["model"]["vocab"]
    added = {t["content"]: t["id"] for t in source["added_tokens"]}
    size = max([*vocabulary.values(), *added.values()]) + 1
    plain = {text: i for text, i in vocabulary.items() if text not in added}
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in source["model"]["merges"]
    ]
    (path / "vocab.json").write_text(json.dumps(plain | added))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    special = {"<|im_start|>": size, "<|im_end|>": size + 1}
    decoder = {
        str(i): {"content": text, "special": True, "normalized": False}
        for text, i in (added | special).items()
    }
    end = next(iter(added))
    names = {"unk_token": end, "bos_token": end, "eos_token": "<|im_end|>", "pad_token": end}
    (path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, **names, **config})
    )
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    return path


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("GPT2Tokenizer", {}),
        ("GPT2Tokenizer", {"add_prefix_space": True, "add_bos_token": True}),
        ("Qwen2Tokenizer", {}),
    ],
)
def test_vocabulary_with_merges_encodes_as_transformers(
    kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path = byte_pair_folder(tmp_path, tokenizer_class=kind, **config)
    oracle, own = getattr(transformers, kind).from_pretrained(path), load_tokenizer(str(path))
    assert isinstance(own, HfTokenizer)
    for text in (*odd_strings(300), "a<|im_end|>b <|im_start|>c", "e\u0301"):
        assert own.encode(text) == oracle(text).input_ids, repr(text)


def test_class_of_a_byte_pair_vocabulary_follows_the_model_type(tmp_path: Path) -> None:
    """Qwen's tokenizers compose accents, GPT-2's do not."""
    path = byte_pair_folder(tmp_path)
    qwen = encode(path, "e\u0301")
    (path / "config.json").write_text('{"model_type": "granite"}')
    assert qwen == encode(path, "é") != encode(path, "e\u0301")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tekken.json", "{}", "its tekken.json"),
        ("tokenizer.model", "IQ== 0\nIg== 1\n", "tiktoken vocabulary"),
        ("README.md", "", "holds no tokenizer.json, no tokenizer.model"),
    ],
)
def test_unread_tokenizer_is_named(
    file: str, content: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(content)
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, NoTokenizer) and reason in tokenizer.reason
    with pytest.raises(BadInput, match="has no tokenizer"):
        tokenizer.encode("text")
    with caplog.at_level(logging.WARNING, "ridgeline"):
        check_tokenizer(tokenizer, 100)
    assert "accepts token ids only" in caplog.text and reason in caplog.text


def test_byte_pairs_of_another_class_are_not_guessed(tmp_path: Path) -> None:
    path = byte_pair_folder(tmp_path, tokenizer_class="CodeLlamaTokenizer")
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, NoTokenizer) and "CodeLlamaTokenizer" in tokenizer.reason


def test_tokenizer_larger_than_the_embedding_is_refused_at_load(tmp_path: Path) -> None:
    shutil.copytree(model_path("demo"), tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    rows = load_spec("demo").vocab_size

    def add(text: str) -> None:
        entry = {"id": rows, "content": text, "special": True, "single_word": False}
        entry |= {"lstrip": False, "rstrip": False, "normalized": False}
        changed = tokenizer | {"added_tokens": [*tokenizer["added_tokens"], entry]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")

    add("<extra>")
    with pytest.raises(BadModel, match=f"token {rows} .<extra>..*limit: {rows} embedding rows"):
        Engine.open(str(tmp_path))
    add("<image_soft_token>")  # as in the text models of Gemma 3
    with Engine.open(str(tmp_path)) as engine:
        assert engine.resolved.spec.vocab_size == rows


def test_model_with_a_sentencepiece_file_generates_text(tmp_path: Path) -> None:
    """The weights of the demo model with other words: the whole path from text to text."""
    shutil.copytree(model_path("demo"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    config = (tmp_path / "config.json").read_text()
    sentencepiece_folder(tmp_path, "bpe-llama", eos_token="</s>")
    (tmp_path / "config.json").write_text(config)
    assert 2 in load_spec(str(tmp_path)).eos_token_ids
    with Engine.open(str(tmp_path)) as engine:
        answer = engine.generate(["Hello"])[0]
    assert answer.text
