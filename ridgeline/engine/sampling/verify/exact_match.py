"""Verification by walking: sample from the target at every place, follow the draft while it agrees.

What. Row i of a run with drafts holds the target's logits after the i-th draft. Each row is sampled
as it would be without speculation: with its own number of (seed, output index), after the penalties
and restrictions that hold at that place. The walk goes on while the token that was drawn is the one
that was guessed; the first that differs is the token after the accepted ones.

Source. The target-only walk of Medusa and of SGLang's tree verification; for a drafter that names
one token per place with certainty (q one-hot), it is Leviathan's rule: the guess x is accepted with
probability p(x), and otherwise the token comes from p without x, normalised.

Invariant. The tokens are *those of plain decoding*, greedy or seeded, not only their distribution:
which guesses were made cannot be seen in them.
When it loses. A drafter that draws from a distribution q of its own is accepted with probability
sum p·q here, and with sum min(p, q), which is more, by rejection sampling (`rejection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.sampling.base import Choice


def accept_matching(drafts: Sequence[int], drawn: Sequence[Choice]) -> list[Choice]:
    """The head of `drawn` (one choice per place, one more than drafts) that the walk reaches."""
    return list(drawn[: count_matching(drafts, [token for token, _ in drawn]) + 1])


def count_matching(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts at the head are the tokens that the model says there."""
    for num, (guess, token) in enumerate(zip(drafts, tokens, strict=False)):
        if guess != token:
            return num
    return len(drafts)
