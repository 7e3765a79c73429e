"""What only the engine can check of an ask: that token ids exist in this model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.errors import BadInput
from ridgeline.records import Sampling


def id_in_use(ask_id: str) -> BadInput:
    """The error for a second ask of the same name."""
    return BadInput("an ask with this id is being served", value=ask_id, fix="use a new id")


def check_tokens(tokens: Iterable[int], vocab_size: int, what: str = "the prompt") -> None:
    """BadInput names the first id outside the vocabulary."""
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadInput(
                f"{what} holds something that is no token id, at place {place}",
                value=token,
                limit=f"integers in 0..{vocab_size - 1}",
                fix="send ids of this model's own tokenizer",
            )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Token ids in `logit_bias` and `stop_token_ids`."""
    check_tokens(sampling.logit_bias, vocab_size, "logit_bias")
    check_tokens(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_tokens(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
