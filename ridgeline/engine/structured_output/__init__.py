"""Token masks for structured output and lists of allowed tokens.

Nothing is imported until a model is assembled, and no grammar library until a request needs one or
a server starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ridgeline.engine.structured_output.base import TokenMasks

MASKS = {
    "llguidance": "ridgeline.engine.structured_output.guidance:GuidanceMasks",
    "none": "ridgeline.engine.structured_output.none:NoGrammars",
}


def make_masks(
    tokenizer_json: Callable[[], str] | None, vocab_size: int, eos_token_ids: Sequence[int]
) -> TokenMasks:
    """The masks of a model; `tokenizer_json` returns the text of its tokenizer.json.

    Without a tokenizer or an end-of-sequence token, only lists of token ids are supported.
    """
    if tokenizer_json is None or not eos_token_ids:
        why = (
            "the model has no tokenizer"
            if tokenizer_json is None
            else "it has no end-of-sequence token"
        )
        return cast("TokenMasks", _load("none")(why))
    return cast("TokenMasks", _load("llguidance")(tokenizer_json, vocab_size, eos_token_ids))


def _load(name: str) -> type:
    module, _, attribute = MASKS[name].partition(":")
    return cast("type", getattr(import_module(module), attribute))
