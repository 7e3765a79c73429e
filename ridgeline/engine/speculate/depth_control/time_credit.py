"""What drafts have saved and lost, in seconds relative to plain steps, and the credit that allows
drafting.

Every step adds `LOSS_SHARE` of a plain step; every step with drafts adds what it saved (or
subtracts what it lost). The balance has a ceiling, so an old gain does not pay for a new loss.
Lookups and computed drafts have separate balances: probes of a draft model that does not pay must
not consume the credit of a lookup that does, nor delay its tries.
"""

from __future__ import annotations

LOSS_SHARE = 0.005  # of every step's time that may be lost to drafts
INITIAL_CREDIT, MAX_CREDIT = 2.0, 6.0  # in plain steps
PROBE_STEPS = 48  # between two tries
MAX_TRY_STEPS = 16 * PROBE_STEPS
_FADE = 1 / 64  # decay of the recent saving, per step
_NEW = 0.3  # weight of the latest try in the expected loss of a try


class CreditBalance:
    """The balance of one kind of drafts: `credit` in plain steps, and when a try without credit is
    due.

    It receives `share` of what every step adds. `recent_saving`: plain steps saved per step
    recently (negative: lost).
    """

    __slots__ = ("_share", "_since_try", "_try_loss", "_try_steps", "credit", "recent_saving")

    def __init__(self, share: float) -> None:
        self.credit, self._share, self.recent_saving = INITIAL_CREDIT * share, share, 0.0
        self._since_try, self._try_steps, self._try_loss = 0, PROBE_STEPS, 1.0

    @property
    def can_afford_try(self) -> bool:
        """Whether the credit covers the expected loss of a try."""
        return self.credit >= self._try_loss

    def add_steps(self, num_steps: int) -> None:
        self.pay(LOSS_SHARE * self._share * num_steps)
        self._since_try += num_steps
        self.recent_saving *= (1 - _FADE) ** num_steps

    def add_drafts(self, saved_steps: float) -> None:
        """Account for a step with drafts that saved this many plain steps (negative: lost)."""
        self.pay(saved_steps)
        self.recent_saving += _FADE * saved_steps

    def pay(self, steps: float) -> None:
        self.credit = min(MAX_CREDIT, self.credit + steps)

    def may_probe(self) -> bool:
        """Whether a short draft that does not pay may be made: every so often, on credit."""
        return self.can_afford_try and self._due(PROBE_STEPS)

    def may_try(self) -> bool:
        """Whether a predicted gain may be tried without credit: half as often after every loss."""
        return self._due(self._try_steps)

    def record_try(self, lost: float, *, was_try: bool) -> None:
        """Record the outcome of drafts, in plain steps."""
        if not was_try:
            self._try_steps = PROBE_STEPS
            return
        self._try_loss = max(0.5, self._try_loss + _NEW * (lost - self._try_loss))
        self._try_steps = min(MAX_TRY_STEPS, 2 * self._try_steps) if lost > 0 else PROBE_STEPS

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
        self.saved_s = self.lost_s = self.predicted_s = self.drafting_s = 0.0

    def balance(self, computed: bool) -> CreditBalance:
        return self.computed if computed else self.looked

    def add_drafts(
        self,
        balance: CreditBalance,
        saved_s: float,
        predicted_s: float,
        took_s: float,
        plain_s: float,
    ) -> None:
        """Account for a step with drafts: saved (negative: lost) and predicted seconds."""
        if saved_s > 0:
            self.saved_s += saved_s
        else:
            self.lost_s -= saved_s
        self.predicted_s += predicted_s
        self.drafting_s += took_s
        balance.add_drafts(saved_s / plain_s)

    def add_steps(self, num_steps: int) -> None:
        """Count steps, with drafts or without."""
        self.looked.add_steps(num_steps)
        self.computed.add_steps(num_steps)

    @property
    def recent_gain(self) -> float:
        """Plain steps saved per step recently, over the kinds that saved any.

        A loss of one kind is no reason to consult the other less often.
        """
        return sum(max(0.0, balance.recent_saving) for balance in (self.looked, self.computed))

    def add_overhead(self, took_s: float) -> None:
        """Account for time spent on decisions without drafts, or on remembering."""
        self.lost_s += took_s

    def as_dict(self) -> dict[str, float]:
        """Seconds so far, for metrics."""
        return {
            "speculation_saved_s": self.saved_s,
            "speculation_lost_s": self.lost_s,
            "speculation_predicted_s": self.predicted_s,
            "speculation_drafting_s": self.drafting_s,
        }
