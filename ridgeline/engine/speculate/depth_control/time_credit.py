"""What drafts have saved and lost, in seconds against plain steps of the same batch; and the credit
without which nothing is drafted.

Every step pays in `LOSS_SHARE` of a plain step; every step with drafts pays in what it saved (or
takes what it lost). The balance has a ceiling, so that an old gain does not pay for a new loss.
What is looked up and what is computed have purses of their own: probes of a draft model that does
not pay must not take the credit of a lookup that does, nor put its tries off.
"""

from __future__ import annotations

LOSS_SHARE = 0.005  # of every step's time that may be lost to drafts
FIRST_CREDIT, MOST_CREDIT = 2.0, 6.0  # plain steps' worth of seconds
PROBE_STEPS = 48  # between two tries
MOST_TRY_STEPS = 16 * PROBE_STEPS
_FADE = 1 / 64  # per step, of what was saved lately
_NEW = 0.3  # weight of the latest try in what tries are taken to lose


class Purse:
    """One sort of drafts: `credit` in plain steps, and when it may be tried without earning. It
    gets `share` of what every step pays in. `lately`: plain steps saved per step of late
    (negative: lost)."""

    __slots__ = ("_share", "_since_try", "_try_loss", "_try_steps", "credit", "lately")

    def __init__(self, share: float) -> None:
        self.credit, self._share, self.lately = FIRST_CREDIT * share, share, 0.0
        self._since_try, self._try_steps, self._try_loss = 0, PROBE_STEPS, 1.0

    @property
    def affords_try(self) -> bool:
        """Whether the credit covers what a try is taken to lose."""
        return self.credit >= self._try_loss

    def begun(self, num_steps: int) -> None:
        self.pay(LOSS_SHARE * self._share * num_steps)
        self._since_try += num_steps
        self.lately *= (1 - _FADE) ** num_steps

    def drafted(self, saved_steps: float) -> None:
        """A step with drafts: what it saved (negative: lost), in plain steps."""
        self.pay(saved_steps)
        self.lately += _FADE * saved_steps

    def pay(self, steps: float) -> None:
        self.credit = min(MOST_CREDIT, self.credit + steps)

    def may_probe(self) -> bool:
        """A short draft although it does not pay: every so often, on credit."""
        return self.affords_try and self._due(PROBE_STEPS)

    def may_try(self) -> bool:
        """What promises a gain, without credit: half as often after every try that lost."""
        return self._due(self._try_steps)

    def judge(self, lost: float, *, was_try: bool) -> None:
        """What became of drafts, in plain steps."""
        if not was_try:
            self._try_steps = PROBE_STEPS
            return
        self._try_loss = max(0.5, self._try_loss + _NEW * (lost - self._try_loss))
        self._try_steps = min(MOST_TRY_STEPS, 2 * self._try_steps) if lost > 0 else PROBE_STEPS

    def _due(self, num_steps: int) -> bool:
        if self._since_try < num_steps:
            return False
        self._since_try = 0
        return True


class Account:
    """See the head of this file. `looked`, `computed`: the purses of the two sorts; `both`: there
    are both."""

    def __init__(self, *, both: bool = False) -> None:
        share = 0.5 if both else 1.0
        self.looked, self.computed = Purse(share), Purse(share)
        self.saved_s = self.lost_s = self.promised_s = self.drafting_s = 0.0

    def purse(self, computed: bool) -> Purse:
        return self.computed if computed else self.looked

    def drafted(
        self, purse: Purse, saved_s: float, promised_s: float, took_s: float, plain_s: float
    ) -> None:
        """A step with drafts: what it saved (negative: lost), and what had been predicted."""
        if saved_s > 0:
            self.saved_s += saved_s
        else:
            self.lost_s -= saved_s
        self.promised_s += promised_s
        self.drafting_s += took_s
        purse.drafted(saved_s / plain_s)

    def begun(self, num_steps: int) -> None:
        """So many steps, with drafts or without."""
        self.looked.begun(num_steps)
        self.computed.begun(num_steps)

    @property
    def gain_lately(self) -> float:
        """Plain steps saved per step of late, by the sorts that saved any: what one sort loses is
        no reason to ask the other less often."""
        return sum(max(0.0, purse.lately) for purse in (self.looked, self.computed))

    def asked(self, took_s: float) -> None:
        """Time spent beside drafts: on deciding that nothing is drafted, or on remembering."""
        self.lost_s += took_s

    def as_dict(self) -> dict[str, float]:
        """Seconds so far. `draft_scheduler`: of steps with drafts. `promised`: predicted to be saved."""
        return {
            "speculation_saved_s": self.saved_s,
            "speculation_lost_s": self.lost_s,
            "speculation_promised_s": self.promised_s,
            "speculation_drafting_s": self.drafting_s,
        }
