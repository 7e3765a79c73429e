"""Special tokens of a GGUF file, by the rules of llama.cpp (src/llama-vocab.cpp, `impl::load`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of a token, as `tokenizer.ggml.token_type` numbers them."""

_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    )
)
"""Texts of tokens that end an answer, whatever their type in the file."""

_FILL_ENDS: Mapping[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of fill-in-the-middle that end an answer too: the key that names one, else its texts."""

_RENDERED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Tokens of gpt-oss that belong to the text."""

_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
}
_WITHOUT_DEFAULT_BOS = ("chatglm-bpe", "glm4", "glm5")


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of "bos", "eos", "eot", …; None where the file has none.

    Where the key is missing it is llama.cpp's default for the kind of tokenizer, if that token is
    a control token.
    """
    tokens = metadata.get(PREFIX + "tokens", ())
    found = metadata.get(f"{PREFIX}{name}_token_id")
    if found is not None:
        return int(found) if 0 <= int(found) < len(tokens) else None
    if name == "bos" and metadata.get(PREFIX + "pre") in _WITHOUT_DEFAULT_BOS:
        return None
    default = _DEFAULT_IDS.get(str(metadata.get(PREFIX + "model")), {}).get(name)
    types = metadata.get(PREFIX + "token_type", ())
    if default is None or default >= len(types) or types[default] not in (CONTROL, UNKNOWN):
        return None
    return default


def end_of_generation(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: the file's eos first, then the others by id."""
    ids = {text: i for i, text in enumerate(metadata.get(PREFIX + "tokens", ()))}
    ends = {text for text in _ENDS if text in ids}
    if ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
        ends.discard("<|end|>")  # ends a message, after which the answer goes on
    if ids.keys() & {"<|tool_response>", "<|plamo:eos|>"}:
        ends.discard("</s>")  # an ordinary token in these vocabularies
    found = {ids[text] for text in ends}
    for key, texts in _FILL_ENDS.items():
        named = special_id(metadata, key)
        found |= {ids[text] for text in texts if text in ids} if named is None else {named}
    named_ids = (special_id(metadata, name) for name in ("eos", "eot", "eom"))
    named_ends = [named_id for named_id in named_ids if named_id is not None]
    return tuple(dict.fromkeys((*named_ends[:1], *sorted(found | set(named_ends)))))


def token_types(metadata: Mapping[str, Any]) -> list[int]:
    """The type of every token.

    One that ends an answer is a control token, whatever the file says.
    """
    tokens = metadata[PREFIX + "tokens"]
    types = list(metadata.get(PREFIX + "token_type", ())) or [NORMAL] * len(tokens)
    for token in end_of_generation(metadata):
        types[token] = CONTROL
    for i, text in enumerate(tokens):
        if text in _RENDERED:
            types[i] = USER_DEFINED
    return types
