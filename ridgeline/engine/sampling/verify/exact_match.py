"""Verification by exact match: sample from the target, accept drafts while they agree.

What. Row i of a run with drafts holds the target's logits after the i-th draft. Each row is sampled
as it would be without speculation: with its own random number of (seed, output index), after the
penalties and restrictions of that position. Drafts are accepted as long as the sampled token equals
the draft; the first sampled token that differs follows the accepted ones.

Source. The target-only walk of Medusa and of SGLang's tree verification. For a drafter that names
one token per position with certainty (q one-hot) it is Leviathan's rule: draft x is accepted with
probability p(x), and otherwise the token comes from p without x, normalised.

Invariant. The tokens are *those of plain decoding*, greedy or seeded, not just equal in
distribution: the drafts do not show in them.
When it loses. A draft sampled from a distribution q is accepted with probability sum p·q here, and
with sum min(p, q), which is more, by rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.sampling.base import Choice


def accept_matching(drafts: Sequence[int], sampled: Sequence[Choice]) -> list[Choice]:
    """The accepted choices: those that match `drafts`, and the one after them.

    `sampled` has one choice per position, one more than there are drafts.
    """
    return list(sampled[: count_matching(drafts, [token for token, _ in sampled]) + 1])


def count_matching(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts, from the first on, equal the sampled tokens."""
    for num, (draft, token) in enumerate(zip(drafts, tokens, strict=False)):
        if draft != token:
            return num
    return len(drafts)
