"""Checks of a request that need the model: token ids must exist in its vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.records.request import MAX_LOGPROBS


def id_in_use(request_id: str) -> BadInput:
    """The error for a second request with the same id."""
    return BadInput("a request with this id is being served", value=request_id, fix="use a new id")


def check_tokens(tokens: Collection[int], vocab_size: int, what: str = "the prompt") -> None:
    """Raise BadInput that names the first token id outside 0..vocab_size - 1."""
    if len(tokens) == 0:
        return
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return  # nearly every prompt, checked without a line of Python per id
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadInput(
                f"{what} contains an invalid token id at index {place}",
                value=token,
                limit=f"integers in 0..{vocab_size - 1}",
                fix="send ids of this model's own tokenizer",
            )


def check_sampling(sampling: Sampling, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise BadInput for invalid token ids, or if min_tokens leaves no token to choose."""
    if sampling.beam is not None and not 0 <= (sampling.logprobs or 0) <= MAX_LOGPROBS:
        limit = f"[0, {MAX_LOGPROBS}]"
        raise BadInput("logprobs is out of range", value=sampling.logprobs, limit=limit)
    check_tokens(sampling.logit_bias, vocab_size, "logit_bias")
    check_tokens(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_tokens(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    check_tokens(sampling.logprob_token_ids, vocab_size, "logprob_token_ids")
    if not sampling.min_tokens or not (sampling.allowed_token_ids or sampling.stop_token_ids):
        return
    # Until min_tokens is reached, tokens that end the answer are banned.
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if not set(sampling.allowed_token_ids or range(vocab_size)) - ends:
        raise BadInput(
            "every allowed token would end the answer before min_tokens",
            value=sampling.min_tokens,
            fix="leave min_tokens out, or allow a token that does not end the answer",
        )
