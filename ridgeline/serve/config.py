"""Limits of a request's content, and what the server derives from its options."""

from __future__ import annotations

import msgspec

from ridgeline.config.server import ServerOptions
from ridgeline.hub.names import served_name


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a request, checked before any work is done for it."""

    max_n: int = 64
    max_prompts: int = 256
    max_choices: int = 1024
    max_stop: int = 16
    max_stop_chars: int = 256
    max_bad_words: int = 256
    max_prediction_chars: int = 1 << 19
    max_logit_bias: int = 300
    max_token_ids: int = 4096
    max_messages: int = 2048
    max_tools: int = 128
    max_documents: int = 256
    max_grammar_bytes: int = 64 << 10
    max_prompt_tokens: int = 4 << 20
    max_inputs: int = 2048
    max_prompt_logprobs: int = 1 << 17
    max_held_logprobs: int = 1 << 22  # of the output; a stream holds none


LIMITS = RequestLimits()


def batch_app_options(options: ServerOptions) -> ServerOptions:
    """Options of the app that runs batch requests in this process.

    Keys and budgets were checked when the batch was uploaded: its requests carry no key. Their
    answers are in the store: none is kept in a second place.
    """
    return msgspec.structs.replace(
        options,
        api_key=None,
        api_keys_file=None,
        requests_per_minute=None,
        tokens_per_minute=None,
        batch_store=None,
        batch_window=None,
        response_cache_size=None,
        semantic_cache_pairs=None,
    )


def split_names(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def model_name(model: str) -> str:
    """The name of a model in the API: that of its repository or directory, `demo` as it is."""
    return served_name(model)
