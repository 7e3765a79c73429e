"""The prompt by which a causal language model judges a document, as Qwen3-Reranker was trained.

The model answers "yes" or "no"; the relevance of the document is the probability of "yes" against
"no" as the next token (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Any model with ChatML's
special tokens can be asked in this form; only models trained for it give useful scores.
"""

from __future__ import annotations

import msgspec

from ridgeline.serve.engine_protocol import ServedTokenizer
from ridgeline.serve.errors import ApiError

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_FIX = "serve a model with ChatML tokens, such as Qwen/Qwen3-Reranker-0.6B"


class RerankTokens(msgspec.Struct, frozen=True):
    """Token ids around each pair, and of the two answers."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    yes: int
    no: int


def rerank_tokens(tokenizer: ServedTokenizer) -> RerankTokens:
    """The template's tokens. ApiError 400 if the model's tokenizer lacks one of them."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    for mark in ("<|im_start|>", "<|im_end|>"):
        if len(encode(mark)) != 1:
            raise ApiError(400, f"this model cannot rerank: it has no token {mark}; fix: {_FIX}")
    answers = [encode(answer) for answer in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in answers):
        raise ApiError(400, f"this model cannot rerank: yes or no is not one token; fix: {_FIX}")
    return RerankTokens(encode(_PREFIX), encode(_SUFFIX), answers[0][0], answers[1][0])


def pair_text(query: str, document: str, instruction: str | None) -> str:
    """The part of the prompt between prefix and suffix."""
    instruction = DEFAULT_INSTRUCTION if instruction is None else instruction
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
