"""Speculative decoding: guess several tokens cheaply, verify them in one step.

The registry names the drafters; none is imported until it is chosen. What the scheduler knows of it
is in `ridgeline.engine.core.drafting`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.engine.core.drafting import Drafts
    from ridgeline.engine.speculate.resolve import Speculation

DRAFTERS = {
    "ngram": "ridgeline.engine.speculate.ngram:NgramDrafter",
}


def make_drafts(asked: Speculation | None) -> Drafts:
    """What the scheduler asks for drafts; `None` for no speculation."""
    from ridgeline.engine.core.drafting import NoDrafts

    if asked is None:
        return NoDrafts()
    from ridgeline.engine.speculate.ngram import NgramDrafter
    from ridgeline.engine.speculate.speculator import FixedDepth

    drafter = NgramDrafter(asked.prompt_lookup_min, asked.prompt_lookup_max)
    return FixedDepth(drafter, asked.num_speculative_tokens)
