"""Tokenizers and templates that `quantize --format gguf` writes: read back, same ids and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from ridgeline.compress.writers.gguf_tokenizer import tokenizer_metadata
from ridgeline.engine.tokenization.gguf import tokenizer_of
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.gguf_tokens import end_of_generation
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec

pytestmark = pytest.mark.slow

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the cat's hat sat on 12345 mats",
    "def f(x):\n    return x + 1\n",
    "naïve café 中文",
] * 50
TEXTS = ["the cat's   hat\n\n\tsat", "12345678", "naïve <|end|> café 中文!", " a", ""]


def byte_pairs(pre_tokenizer: Any, *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<s>", "<|end|>", "<|im_end|>"])
    return tokenizer


def split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, spell])


def gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2()])


def pieces() -> Tokenizer:
    """Like Llama 2's: byte tokens for text without a piece, and a space before the text."""
    tokenizer = Tokenizer(models.BPE())
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([line.split("\n")[0] for line in CORPUS], trainer)
    document = json.loads(tokenizer.to_str())
    document["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    document["added_tokens"] = document["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(document))


@pytest.fixture
def spec() -> ModelSpec:
    return load_spec("demo")


def written(folder: Path, tokenizer: Tokenizer, spec: ModelSpec, **config: Any) -> dict[str, Any]:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_metadata(folder, spec)


@pytest.mark.parametrize(
    ("tokenizer", "pre"),
    [
        (lambda: byte_pairs(gpt2()), "gpt-2"),
        (lambda: byte_pairs(digits()), "starcoder"),
        (lambda: byte_pairs(split(LLAMA3), ignore_merges=True), "llama3"),
        (lambda: byte_pairs(split(LLAMA3)), "dbrx"),
        (lambda: byte_pairs(split(LLAMA3.replace("{1,3}", ""))), "qwen2"),
        (pieces, "default"),
    ],
)
def test_written_tokenizer_gives_the_same_ids(
    tokenizer: Any, pre: str, tmp_path: Path, spec: ModelSpec
) -> None:
    original = tokenizer()
    metadata = written(tmp_path, original, spec)
    assert metadata["tokenizer.ggml.pre"] == pre
    assert len(metadata["tokenizer.ggml.tokens"]) == spec.vocab_size
    reader = tokenizer_of(metadata)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert reader.encode(text).ids == ids
        assert reader.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_their_places_are_kept(tmp_path: Path, spec: ModelSpec) -> None:
    tokenizer = byte_pairs(gpt2())
    bos, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "<|end|>"], special_tokens=[("<s>", bos), ("<|end|>", end)]
    )
    metadata = written(tmp_path, tokenizer, spec, pad_token={"content": "<s>"})
    assert metadata["tokenizer.ggml.add_bos_token"] is metadata["tokenizer.ggml.add_eos_token"]
    assert metadata["tokenizer.ggml.bos_token_id"] == bos
    assert metadata["tokenizer.ggml.padding_token_id"] == bos
    assert end_of_generation(metadata)[0] == end
    assert set(spec.eos_token_ids) <= set(end_of_generation(metadata))
    assert tokenizer_of(metadata).encode("cat").ids == tokenizer.encode("cat").ids


def test_all_chat_templates_are_kept(tmp_path: Path, spec: ModelSpec) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "rag", "template": "of rag"}]
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("of tools")
    metadata = written(tmp_path, byte_pairs(gpt2()), spec, chat_template=named)
    assert metadata["tokenizer.chat_template"] == "new"
    assert metadata["tokenizer.chat_template.rag"] == "of rag"
    assert metadata["tokenizer.chat_template.tool_use"] == "of tools"
    assert metadata["tokenizer.chat_templates"] == ["rag", "tool_use"]


def lowercased() -> Tokenizer:
    tokenizer = byte_pairs(gpt2())
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def with_token_beyond_the_table() -> Tokenizer:
    tokenizer = byte_pairs(gpt2())
    tokenizer.add_tokens([AddedToken(f"<extra {i}>") for i in range(8000)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "WordLevel"),
        (lambda: byte_pairs(split(r"[aeiou]+|[^aeiou]+")), "splits words"),
        (lowercased, "Lowercase"),
        (with_token_beyond_the_table, "beyond the"),
    ],
)
def test_other_tokenizers_are_refused(
    tokenizer: Any, reason: str, tmp_path: Path, spec: ModelSpec
) -> None:
    with pytest.raises(CannotRun, match=reason):
        written(tmp_path, tokenizer(), spec)
