"""What drafts have saved and lost, in seconds relative to plain steps, and the credit that allows
drafting.

Every step adds `LOSS_SHARE` of a plain step; every step with drafts adds what it saved (or
subtracts what it lost). The balance has a ceiling, so an old gain does not pay for a new loss.
Lookups and computed drafts have separate balances: probes of a draft model that does not pay must
not consume the credit of a lookup that does, nor delay its tries.
"""

from __future__ import annotations

LOSS_SHARE = 0.005  # of every step's time that may be lost to drafts
FIRST_CREDIT, MOST_CREDIT = 2.0, 6.0  # plain steps' worth of seconds
PROBE_STEPS = 48  # between two tries
MOST_TRY_STEPS = 16 * PROBE_STEPS
_FADE = 1 / 64  # per step, of what was saved lately
_NEW = 0.3  # weight of the latest try in what tries are taken to lose


class CreditBalance:
    """The balance of one kind of drafts: `credit` in plain steps, and when a try without credit is
    due.

    It receives `share` of what every step adds. `lately`: plain steps saved per step recently
    (negative: lost).
    """

    __slots__ = ("_share", "_since_try", "_try_loss", "_try_steps", "credit", "lately")

    def __init__(self, share: float) -> None:
        self.credit, self._share, self.lately = FIRST_CREDIT * share, share, 0.0
        self._since_try, self._try_steps, self._try_loss = 0, PROBE_STEPS, 1.0

    @property
    def affords_try(self) -> bool:
        """Whether the credit covers the expected loss of a try."""
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
        """Whether a short draft that does not pay may be made: every so often, on credit."""
        return self.affords_try and self._due(PROBE_STEPS)

    def may_try(self) -> bool:
        """Whether a predicted gain may be tried without credit: half as often after every loss."""
        return self._due(self._try_steps)

    def judge(self, lost: float, *, was_try: bool) -> None:
        """Record the outcome of drafts, in plain steps."""
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


class TimeCredit:
    """The balances of `looked`-up and `computed` drafts; `both`: there are both kinds."""

    def __init__(self, *, both: bool = False) -> None:
        share = 0.5 if both else 1.0
        self.looked, self.computed = CreditBalance(share), CreditBalance(share)
        self.saved_s = self.lost_s = self.promised_s = self.drafting_s = 0.0

    def purse(self, computed: bool) -> CreditBalance:
        return self.computed if computed else self.looked

    def drafted(
        self, purse: CreditBalance, saved_s: float, promised_s: float, took_s: float, plain_s: float
    ) -> None:
        """A step with drafts: what it saved (negative: lost), and what was predicted."""
        if saved_s > 0:
            self.saved_s += saved_s
        else:
            self.lost_s -= saved_s
        self.promised_s += promised_s
        self.drafting_s += took_s
        purse.drafted(saved_s / plain_s)

    def begun(self, num_steps: int) -> None:
        """Count steps, with drafts or without."""
        self.looked.begun(num_steps)
        self.computed.begun(num_steps)

    @property
    def gain_lately(self) -> float:
        """Plain steps saved per step recently, over the kinds that saved any.

        A loss of one kind is no reason to consult the other less often.
        """
        return sum(max(0.0, purse.lately) for purse in (self.looked, self.computed))

    def asked(self, took_s: float) -> None:
        """Time spent deciding that nothing is drafted, or remembering."""
        self.lost_s += took_s

    def as_dict(self) -> dict[str, float]:
        """Seconds so far, for metrics."""
        return {
            "speculation_saved_s": self.saved_s,
            "speculation_lost_s": self.lost_s,
            "speculation_promised_s": self.promised_s,
            "speculation_drafting_s": self.drafting_s,
        }
