"""What only the engine can check of a request: that token ids exist in this model's vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ridgeline.errors import BadInput
from ridgeline.records import Sampling


def id_in_use(request_id: str) -> BadInput:
    """The error for a second request of the same name."""
    return BadInput("a request with this id is being served", value=request_id, fix="use a new id")


def check_tokens(tokens: Collection[int], vocab_size: int, what: str = "the prompt") -> None:
    """BadInput names the first id outside the vocabulary."""
    if len(tokens) == 0:
        return
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return  # what nearly every prompt is, told without a line of Python per id
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadInput(
                f"{what} holds something that is no token id, at place {place}",
                value=token,
                limit=f"integers in 0..{vocab_size - 1}",
                fix="send ids of this model's own tokenizer",
            )


def check_sampling(sampling: Sampling, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Token ids in `logit_bias`, `stop_token_ids` and `allowed_token_ids`; and that some token may
    come out."""
    check_tokens(sampling.logit_bias, vocab_size, "logit_bias")
    check_tokens(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_tokens(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    if sampling.min_tokens and (sampling.allowed_token_ids or sampling.stop_token_ids):
        _check_choice(sampling, vocab_size, () if sampling.ignore_eos else eos_token_ids)


def _check_choice(sampling: Sampling, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Before `min_tokens` nothing may come out that would end the answer."""
    ends = {*sampling.stop_token_ids, *eos_token_ids}
    if not set(sampling.allowed_token_ids or range(vocab_size)) - ends:
        raise BadInput(
            "every token that may come out would end the answer before min_tokens",
            value=sampling.min_tokens,
            fix="leave min_tokens out, or allow a token that does not end it",
        )
