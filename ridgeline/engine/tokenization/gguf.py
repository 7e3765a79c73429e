"""The tokenizer and chat template inside a GGUF file, as the `tokenizers` library's objects.

Two kinds are read: byte-pair encoding ("gpt2", "gemma4") and SentencePiece's variant of it
("llama"), whose merges are recovered from its pieces and their scores. Token ids are those of
llama.cpp; another kind, or an unknown word pattern, is refused because it would give other ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ridgeline.engine.tokenization.gguf_patterns import PRE_TOKENIZERS, PreTokenizer
from ridgeline.engine.tokenization.merges import ranked_merges
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_tokens import (
    CONTROL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    special_id,
    token_types,
)

if TYPE_CHECKING:
    import tokenizers

_KEEPS_RIGHT_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 after which llama.cpp keeps spaces; it strips them after all others."""


def tokenizer_of(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that a file's metadata describes. Raises BadModel."""
    kind = metadata.get(PREFIX + "model")
    builders = {"gpt2": _byte_pairs, "gemma4": _byte_pairs, "llama": _sentence_piece}
    if kind not in builders:
        raise BadModel(
            "the GGUF file's tokenizer is of a kind that is not read",
            value=f"tokenizer.ggml.model {kind}",
            limit=", ".join(builders),
            fix="send token ids, or use the model's safetensors directory",
        )
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(metadata[PREFIX + "tokens"])]
    inner = builders[kind](tokens, metadata)
    _add_special_tokens(inner, tokens, metadata)
    _add_ends(inner, tokens, metadata)
    return inner


def why_unsupported(metadata: Mapping[str, Any]) -> str | None:
    """Why texts cannot be encoded as llama.cpp does; None if they can."""
    kind = metadata.get(PREFIX + "model")
    if kind not in ("gpt2", "gemma4", "llama"):
        return f"its tokenizer.ggml.model {kind} is not supported"
    name = metadata.get(PREFIX + "pre") or "default"
    if kind == "gpt2" and name not in PRE_TOKENIZERS:
        return f"its tokenizer.ggml.pre {name} is not known"
    return None


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name, such as "default" and "tool_use"."""
    start = "tokenizer.chat_template"
    return {
        key.removeprefix(start).removeprefix(".") or "default": str(source)
        for key, source in metadata.items()
        if key == start or key.startswith(f"{start}.")
    }


def pre_tokenizer_of(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The word patterns that the file names. Raises BadModel for a name that is not known."""
    name = str(metadata.get(PREFIX + "pre") or "default")
    if metadata.get(PREFIX + "model") == "gemma4":
        name = "gemma4"
    if name not in PRE_TOKENIZERS:
        raise BadModel(
            "a GGUF tokenizer with an unknown word pattern",
            value=f"tokenizer.ggml.pre {name}",
            limit=", ".join(PRE_TOKENIZERS),
        )
    return PRE_TOKENIZERS[name]


def _byte_pairs(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = pre_tokenizer_of(metadata)
    pairs = [_pair(merge) for merge in metadata.get(PREFIX + "merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(
        models.BPE(
            vocab,
            pairs,
            ignore_merges=words.ignore_merges,
            byte_fallback=not words.byte_level,
        )
    )
    if words.byte_level:
        inner.decoder = decoders.ByteLevel()
    else:
        inner.normalizer = normalizers.Replace(" ", "▁")
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    inner.pre_tokenizer = split_steps(words)
    return inner


def split_steps(words: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The steps that split a text into words, and spell them in GPT-2's byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        for pattern in words.patterns
    ]
    if words.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _pair(merge: str) -> tuple[str, str]:
    """The two halves of a merge; the first may itself begin with a space."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentence_piece(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = metadata[PREFIX + "scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = special_id(metadata, "unknown")
    inner = Tokenizer(
        models.BPE(
            vocab,
            ranked_merges({token: (i, scores[i]) for token, i in vocab.items()}),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    last: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return inner


def _add_special_tokens(
    inner: tokenizers.Tokenizer, tokens: list[str], metadata: Mapping[str, Any]
) -> None:
    from tokenizers import AddedToken

    name = str(metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name
    types = token_types(metadata)
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        inner.add_tokens(
            [
                AddedToken(
                    tokens[i],
                    special=special,
                    normalized=False,
                    rstrip=strips and tokens[i] not in _KEEPS_RIGHT_SPACE,
                )
                for i, kind in enumerate(types)
                if kind in kinds
            ]
        )


def _add_ends(inner: tokenizers.Tokenizer, tokens: list[str], metadata: Mapping[str, Any]) -> None:
    """Put the beginning- and end-of-text tokens around an encoded text, where the file says so."""
    from tokenizers import processors

    sentence_piece = metadata.get(PREFIX + "model") == "llama"
    default = sentence_piece or pre_tokenizer_of(metadata).add_bos
    before = (
        special_id(metadata, "bos") if metadata.get(PREFIX + "add_bos_token", default) else None
    )
    after = special_id(metadata, "eos") if metadata.get(PREFIX + "add_eos_token") else None
    for key in ("bos", "eos"):
        token_id = metadata.get(f"{PREFIX}{key}_token_id")
        if token_id is not None and special_id(metadata, key) is None:
            raise BadModel(
                "the GGUF file names a special token outside its vocabulary",
                value=f"{PREFIX}{key}_token_id {token_id}",
                limit=len(tokens) - 1,
            )
    first = [] if before is None else [tokens[before]]
    last = [] if after is None else [tokens[after]]
    if first or last:
        inner.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", "$B", *last],
            special_tokens=[(tokens[i], i) for i in {before, after} if i is not None],
        )


def template_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a chat template may name."""
    tokens: list[str] = metadata[PREFIX + "tokens"]
    found = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        token = special_id(metadata, key)
        if token is not None:
            found[f"{name}_token"] = tokens[token]
    return found
