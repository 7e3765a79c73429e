"""Tokenizers, chat templates, incremental detokenisation and stop strings. No torch."""

from __future__ import annotations

from ridgeline.engine.tokenization.tokenizer import (
    HfTokenizer,
    NoTokenizer,
    Tokenizer,
    bos_tokens,
    check_tokenizer,
    load_tokenizer,
)

__all__ = [
    "HfTokenizer",
    "NoTokenizer",
    "Tokenizer",
    "bos_tokens",
    "check_tokenizer",
    "load_tokenizer",
]
