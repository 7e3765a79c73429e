"""Checks by content that two models have the same vocabulary.

Names and sizes are not sufficient: vocabularies are padded (Qwen's 151,936 and 152,064 are the same
tokenizer) and different ones may have the same size. A draft from another vocabulary is almost
always rejected and, if sampled, silently wrong.
"""

from __future__ import annotations

from ridgeline.engine.tokenization import Tokenizer
from ridgeline.engine.tokenization.tokenizer import HfTokenizer
from ridgeline.errors import CannotRun


def check_same_tokens(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise CannotRun naming the first different token; models without tokenizers cannot be
    compared.
    """
    if not (isinstance(target, HfTokenizer) and isinstance(draft, HfTokenizer)):
        return
    ours, theirs = target.inner.get_vocab(), draft.inner.get_vocab()
    for text, token in ours.items():
        if theirs.get(text) != token:
            raise CannotRun(
                "the draft model's tokenizer is not the target's",
                value=f"{name}: {text!r} is {theirs.get(text, 'missing')} there",
                limit=f"{text!r} is {token}",
                fix="name a draft model with the target's tokenizer",
            )
    if len(theirs) > len(ours):
        extra = next(text for text in theirs if text not in ours)
        raise CannotRun(
            "the draft model's tokenizer has tokens that the target's lacks",
            value=f"{name}: {extra!r}",
            limit=f"{len(ours)} tokens",
            fix="name a draft model with the target's tokenizer",
        )
