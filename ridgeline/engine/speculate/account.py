"""What drafts have saved and lost, in seconds against plain steps of the same batch; and the credit
without which nothing is drafted.

Every step pays in `LOSS_SHARE` of a plain step; every step with drafts pays in what it saved (or
takes what it lost). The balance has a ceiling, so that an old gain does not pay for a new loss.
"""

from __future__ import annotations

LOSS_SHARE = 0.005  # of every step's time that may be lost to drafts
FIRST_CREDIT, MOST_CREDIT = 2.0, 6.0  # plain steps' worth of seconds
_FADE = 1 / 64  # per step, of what was saved lately


class Account:
    """See the head of this file. `credit` is in plain steps; `lately`: of them, saved per step of
    late (negative: lost)."""

    def __init__(self) -> None:
        self.credit, self.lately = FIRST_CREDIT, 0.0
        self.saved_s = self.lost_s = self.promised_s = self.drafting_s = 0.0

    def drafted(self, saved_s: float, promised_s: float, took_s: float, plain_s: float) -> None:
        """A step with drafts: what it saved (negative: lost), and what had been predicted."""
        if saved_s > 0:
            self.saved_s += saved_s
        else:
            self.lost_s -= saved_s
        self.promised_s += promised_s
        self.drafting_s += took_s
        self._pay(saved_s / plain_s)
        self.lately += _FADE * saved_s / plain_s

    def begun(self, num_steps: int) -> None:
        """So many steps, with drafts or without."""
        self._pay(LOSS_SHARE * num_steps)
        self.lately *= (1 - _FADE) ** num_steps

    def asked(self, took_s: float) -> None:
        """Time spent beside drafts: on deciding that nothing is drafted, or on remembering."""
        self.lost_s += took_s

    def as_dict(self) -> dict[str, float]:
        """Seconds so far. `drafting`: of steps with drafts. `promised`: predicted to be saved."""
        return {
            "speculation_saved_s": self.saved_s,
            "speculation_lost_s": self.lost_s,
            "speculation_promised_s": self.promised_s,
            "speculation_drafting_s": self.drafting_s,
        }

    def _pay(self, steps: float) -> None:
        self.credit = min(MOST_CREDIT, self.credit + steps)
