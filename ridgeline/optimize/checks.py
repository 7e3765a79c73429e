"""Does a candidate still say the same? Token for token if it claims to be exact, by the gate if
not.

An exact rung is checked and not believed: its greedy continuations of a few prompts, sent
together so that they share batches, must equal the incumbent's. Where two outputs part at a
position whose two best tokens are as good as equal, that is rounding and is counted as a near
tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.optimize import quality
from ridgeline.optimize.ground import Ground
from ridgeline.optimize.quality import Array, Quality
from ridgeline.optimize.result import Exactness
from ridgeline.optimize.subject import Lab, Subject

CHECK_S = 1.5  # about how long the continuations may take
LEAST_TOKENS, MOST_TOKENS = 8, 32
GATE_SHARE = 0.04  # of the budget, for each side's reading of the held-out text
LEAST_WINDOWS = 6

Outputs = list[tuple[int, ...]]


class Gatekeeper:
    """Holds what the checks compare with: the incumbent's tokens, the baseline's distributions."""

    def __init__(self, lab: Lab, ground: Ground) -> None:
        self._lab, self._ground = lab, ground
        self._num_tokens = LEAST_TOKENS
        self._known: tuple[Subject, Outputs] | None = None
        self._reference: list[Array] | None = None

    async def time_one_answer(self, subject: Subject) -> float:
        """Seconds of one typical answer to a lone request, after a little warm-up."""
        prompts = self._lab.check_prompts[:1]
        await subject.greedy(prompts, 2)
        num_tokens = max(2, min(self._lab.longest_output, MOST_TOKENS))
        begun_s = self._ground.budget.spent_s
        await subject.greedy(prompts, num_tokens)
        took_s = self._ground.budget.spent_s - begun_s
        per_token_s = max(took_s / num_tokens, 1e-6)
        self._num_tokens = round(min(max(CHECK_S / per_token_s, LEAST_TOKENS), MOST_TOKENS))
        return per_token_s * self._lab.longest_output

    async def same_tokens(self, incumbent: Subject, candidate: Subject) -> Exactness:
        """Compare greedy continuations of the check prompts."""
        self._ground.tell("checking that it gives the same tokens")
        prompts = self._lab.check_prompts
        if self._known is None or self._known[0] is not incumbent:
            self._known = incumbent, await incumbent.greedy(prompts, self._num_tokens)
        before, after = self._known[1], await candidate.greedy(prompts, self._num_tokens)
        ties, detail = 0, ""
        for prompt, old, new in zip(prompts, before, after, strict=True):
            if old == new:
                continue
            where = _first_difference(old, new)
            gap = incumbent.margin(prompt, old, where)
            if gap < self._lab.near_tie:
                ties += 1
            else:
                detail = detail or (
                    f"token {where + 1} of a continuation differs where the two best tokens are "
                    f"{gap:.2g} nats apart"
                )
        return Exactness(
            num_prompts=len(prompts),
            num_tokens=sum(map(len, before)),
            same=not detail,
            near_ties=ties,
            detail=detail,
        )

    def quality(self, incumbent: Subject, candidate: Subject) -> Quality:
        """The gate, against the baseline's own distributions.

        They are read from the incumbent at the first lossy candidate: until then every kept rung
        was exact, so the incumbent speaks for the baseline.
        """
        gate, size = quality.shipped()
        if self._reference is None:
            count = quality.affordable(self._lab.heldout, self._lab.vocab_size, size)
            self._reference = self._read(incumbent, self._lab.heldout[:count])
        pieces = self._lab.heldout[: len(self._reference)]
        found, kl = quality.compare(pieces, self._reference, candidate.logprobs_of)
        return quality.judge(found, kl, gate, size)

    def _read(self, subject: Subject, pieces: Sequence[Sequence[int]]) -> list[Array]:
        """Log-probabilities of each window, fewer of them where the model is slow."""
        budget, kept = self._ground.budget, []
        stop_s = budget.spent_s + GATE_SHARE * budget.total_s
        for tokens in pieces:
            kept.append(np.asarray(subject.logprobs_of(tokens), dtype=np.float32))
            if len(kept) >= LEAST_WINDOWS and budget.spent_s > stop_s:
                break
        return kept


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    pairs = zip(old, new, strict=False)
    shorter = min(len(old), len(new))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
