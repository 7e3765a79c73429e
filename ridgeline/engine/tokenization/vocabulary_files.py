"""Tokenizers of directories without a tokenizer.json, built as transformers builds them.

Two layouts are read: `tokenizer.model` (SentencePiece, unigram or byte pairs) and `vocab.json` with
`merges.txt` (byte-level byte pairs). Their special tokens lie in tokenizer_config.json,
special_tokens_map.json and added_tokens.json. What cannot be read exactly is refused with a reason,
and the model then accepts token ids only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.engine.tokenization.merges import ranked_merges
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.sentencepiece_model import (
    BYTE,
    BYTE_PAIRS,
    CONTROL,
    FILE,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece,
)
from ridgeline.modelspec.checkpoints.special_tokens import (
    declared_tokens,
    special_token_names,
    token_text,
    tokenizer_config,
)

if TYPE_CHECKING:
    import tokenizers

VOCABULARY, MERGES = "vocab.json", "merges.txt"
OTHER_LAYOUTS = {
    "tekken.json": "Mistral's tekken.json",
    "tiktoken.model": "a tiktoken vocabulary",
    "qwen.tiktoken": "a tiktoken vocabulary",
    "vocab.txt": "a WordPiece vocabulary",
}
"""Tokenizer files that are not read, with their names."""

_NEVER = -1e6
"""The score of a byte token, which may replace an unknown character but never the text "<0x41>"."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UnreadTokenizer(Exception):
    """Why the files of a directory give no tokenizer."""


def read_vocabulary_files(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a directory. Raises UnreadTokenizer with a reason, BadModel for bad ones."""
    if (path / FILE).is_file():
        return _sentence_piece(path, _read_sentencepiece(path / FILE))
    if (path / VOCABULARY).is_file() and (path / MERGES).is_file():
        return _byte_pairs(path)
    for name, meaning in OTHER_LAYOUTS.items():
        if (path / name).is_file():
            raise UnreadTokenizer(f"its {name} ({meaning}) is not read; add a tokenizer.json")
    raise UnreadTokenizer(
        f"the directory holds no tokenizer.json, no {FILE}, and no {VOCABULARY} with {MERGES}"
    )


def _read_sentencepiece(file: Path) -> SentencePieceModel:
    with file.open("rb") as opened:
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", opened.read(200)):
            raise UnreadTokenizer(f"its {FILE} is a tiktoken vocabulary; add a tokenizer.json")
    return read_sentencepiece(file)


def _sentence_piece(path: Path, model: SentencePieceModel) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders

    if model.kind not in (UNIGRAM, BYTE_PAIRS):
        raise UnreadTokenizer(f"its {FILE} is neither a unigram nor a byte-pair model")
    if model.whitespace_as_suffix or not model.escape_whitespaces:
        raise UnreadTokenizer(f"its {FILE} marks blanks in a way that is not read")
    if any(piece.type == UNUSED for piece in model.pieces):
        raise UnreadTokenizer(f"its {FILE} holds unused pieces")
    config = tokenizer_config(path)
    # Fine-tunes give reserved pieces new names.
    names = {i: text for i, text in declared_tokens(path).items() if i < len(model.pieces)}
    texts = [names.get(i, piece.text) for i, piece in enumerate(model.pieces)]
    inner = Tokenizer(_pieces(model, texts))
    _normalise(inner, model, texts, legacy=config.get("legacy") is not False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else steps
    )
    special = {texts[i] for i, p in enumerate(model.pieces) if p.type in (CONTROL, UNKNOWN)}
    _add_tokens(inner, path, special)
    defaults = {"bos_token": model.bos, "eos_token": model.eos}
    known = {key: texts[token] for key, token in defaults.items() if token is not None}
    _add_ends(inner, known | special_token_names(config), config, add_bos=True)
    return inner


def _pieces(model: SentencePieceModel, texts: list[str]) -> tokenizers.models.Model:
    from tokenizers import models

    if model.kind == UNIGRAM:
        scores = [_NEVER if piece.type == BYTE else piece.score for piece in model.pieces]
        vocabulary = list(zip(texts, scores, strict=True))
        return models.Unigram(vocabulary, unk_id=model.unk, byte_fallback=model.byte_fallback)
    mergeable = {
        text: (i, piece.score)
        for i, (text, piece) in enumerate(zip(texts, model.pieces, strict=True))
        if piece.type == NORMAL
    }
    return models.BPE(
        {text: i for i, text in enumerate(texts)},
        ranked_merges(mergeable),
        unk_token=texts[model.unk],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=any(piece.type == USER_DEFINED for piece in model.pieces),
    )


def _normalise(
    inner: tokenizers.Tokenizer, model: SentencePieceModel, texts: list[str], *, legacy: bool
) -> None:
    """SentencePiece's order: replacements, extra blanks, the first blank, user-defined pieces.

    A text between special tokens begins with a blank only if `legacy`, as in transformers.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.add_dummy_prefix and legacy:
        steps.append(normalizers.Prepend("▁"))
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    words: list[Any] = []
    if model.add_dummy_prefix and not legacy:
        words.append(pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False))
    whole = [t for t, p in zip(texts, model.pieces, strict=True) if p.type == USER_DEFINED]
    if whole:
        pattern = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
        words.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if words:
        inner.pre_tokenizer = pre_tokenizers.Sequence(words)


def _byte_pairs(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    config = tokenizer_config(path)
    kind = _byte_pair_class(path, config)
    vocabulary = read_json(path / VOCABULARY)
    try:
        model = models.BPE(vocabulary, _read_merges(path / MERGES))
    except Exception as error:  # the library raises bare Exception
        raise BadModel(
            f"{VOCABULARY} and {MERGES} do not belong together", value=str(path), fix=str(error)
        ) from None
    inner, prefix = Tokenizer(model), bool(config.get("add_prefix_space"))
    inner.decoder = decoders.ByteLevel()
    if kind == "Qwen2Tokenizer":
        inner.normalizer = normalizers.NFC()
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    _add_tokens(inner, path, set())
    names = {"bos_token": "<|endoftext|>", **special_token_names(config)}
    _add_ends(inner, names, config, add_bos=False)
    return inner


def _byte_pair_class(path: Path, config: Mapping[str, Any]) -> str:
    """GPT2Tokenizer or Qwen2Tokenizer; their word patterns differ."""
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if not name:
        family = str(read_json(path / "config.json").get("model_type", ""))
        name = "Qwen2Tokenizer" if family.startswith("qwen") else "GPT2Tokenizer"
    if name not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise UnreadTokenizer(
            f"its {VOCABULARY} and {MERGES} are for {name}, which is not read; add a tokenizer.json"
        )
    return name


def _read_merges(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel("cannot read the merges", value=str(file), fix=str(error)) from None
    pairs = [line.rstrip("\r").split(" ") for line in lines if line and line[:8] != "#version"]
    bad = next((pair for pair in pairs if len(pair) != 2), None)
    if bad is not None:
        raise BadModel("a merge is not two tokens", value=" ".join(bad)[:80], limit=str(file))
    return [(first, second) for first, second in pairs]


def _add_tokens(inner: tokenizers.Tokenizer, path: Path, special: set[str]) -> None:
    """Add the tokens that the directory declares, each under its own id. Raises BadModel."""
    from tokenizers import AddedToken

    config, declared = tokenizer_config(path), declared_tokens(path)
    details = config.get("added_tokens_decoder")
    by_id = details if isinstance(details, Mapping) else {}
    named = {*special_token_names(config).values(), *special, *_additional(config)}
    for token in sorted(named):
        index = inner.token_to_id(token)
        if index is not None:
            declared.setdefault(index, token)
    for index, text in sorted(declared.items()):
        while inner.get_vocab_size() < index:  # ids that no file names
            inner.add_tokens([f"[EMPTY_{inner.get_vocab_size()}]"])
        own = by_id.get(str(index))
        flags = {key: bool(own[key]) for key in _FLAGS if key in own} if own else {}
        flags.setdefault("special", text in named)
        flags.setdefault("normalized", False)
        inner.add_tokens([AddedToken(text, **flags)])
        if inner.token_to_id(text) != index:
            raise BadModel(
                "an added token has another id in the vocabulary",
                value=f"{text} is {inner.token_to_id(text)}, declared as {index}",
                limit=str(path),
            )


_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


def _additional(config: Mapping[str, Any]) -> list[str]:
    tokens = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    texts = [token_text(token) for token in tokens] if isinstance(tokens, list) else []
    return [text for text in texts if text is not None]


def _add_ends(
    inner: tokenizers.Tokenizer, names: Mapping[str, str], config: Mapping[str, Any], add_bos: bool
) -> None:
    """Put BOS before and EOS after a text if the tokenizer does; BOS by default if `add_bos`."""
    from tokenizers import processors

    wanted = config.get("add_bos_token")
    first = _end(inner, names, "bos_token") if (add_bos if wanted is None else wanted) else []
    last = _end(inner, names, "eos_token") if config.get("add_eos_token") else []
    if first or last:
        inner.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", "$B", *last],
            special_tokens=[(text, inner.token_to_id(text)) for text in {*first, *last}],
        )


def _end(inner: tokenizers.Tokenizer, names: Mapping[str, str], key: str) -> list[str]:
    text = names.get(key)
    return [text] if text is not None and inner.token_to_id(text) is not None else []
