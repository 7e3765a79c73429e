"""The tokenizer and chat template inside a GGUF file, as the `tokenizers` library's objects.

Two kinds are read: byte-level BPE ("gpt2", with the word patterns of gpt-2, llama-bpe and qwen2)
and SentencePiece BPE ("llama"), whose merges are recovered from its pieces and their scores.
Another kind or pattern is refused: it would give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ridgeline.errors import BadModel

if TYPE_CHECKING:
    import tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|@NUMBER@| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, str | None] = {
    "gpt-2": None,  # the byte-level pre-tokenizer's own
    "llama-bpe": _WORDS.replace("@NUMBER@", r"\p{N}{1,3}"),
    "qwen2": _WORDS.replace("@NUMBER@", r"\p{N}"),
}
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_of(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that a file's metadata describes. Raises BadModel."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise BadModel("a GGUF tokenizer of unknown kind", value=str(kind), limit="gpt2, llama")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    inner = builders[kind](tokens, metadata)
    _add_special(inner, tokens, metadata)
    return inner


def _byte_level(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in PATTERNS:
        raise BadModel(
            "a GGUF tokenizer with an unknown word pattern", value=name, limit=", ".join(PATTERNS)
        )
    pairs = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", [])]
    merges = [(pair[0], pair[1]) for pair in pairs]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    pattern = PATTERNS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is None:
        inner.pre_tokenizer = byte_level
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentence_piece(tokens: list[str], metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = metadata["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    inner = Tokenizer(
        models.BPE(
            vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    last: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return inner


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, best piece first."""
    found = []
    for piece, at in vocab.items():
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(a, b) for a, b in halves if a in vocab and b in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[at], pair) for pair in known]
    found.sort(key=lambda each: -each[0])
    return [pair for _, pair in found]


def _add_special(
    inner: tokenizers.Tokenizer, tokens: list[str], metadata: Mapping[str, Any]
) -> None:
    from tokenizers import AddedToken, processors

    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [tokens[i] for i, each in enumerate(types) if each == kind]
        inner.add_tokens([AddedToken(t, special=special, normalized=False) for t in marked])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    default = metadata.get("tokenizer.ggml.model") == "llama"
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        text = tokens[int(bos)]
        inner.post_processor = processors.TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", "$B"], special_tokens=[(text, int(bos))]
        )


def template_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a chat template may name."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    found = {}
    for name in ("bos", "eos"):
        at = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if at is not None:
            found[f"{name}_token"] = tokens[int(at)]
    return found
