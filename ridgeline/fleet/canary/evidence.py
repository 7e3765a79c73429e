"""Evidence that a canary is worse, which may be looked at after every request.

Each class holds an e-process: a product of bets that expects to stay at one while the canary is no
worse than the stable version. By Ville's inequality it ever exceeds 1/alpha with a probability of
at most alpha, whenever one looks and stops. A bet is a likelihood ratio; several alternatives are
averaged, so that none has to be guessed. (Ramdas et al., "Game-theoretic statistics and safe
anytime-valid inference", 2023.)

EventEvidence   errors and missed SLOs: of those that happen, the canary's part should be its share
                of the sessions
RankEvidence    times: among a few sessions, of which one is the canary's, its rank is uniform
RateEvidence    differing tokens: no more than a bound per token

Every bet uses sessions that no earlier one used, so that a session with many slow requests counts
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ODDS_RATIOS = (1.25, 1.5, 2.0, 5.0, 20.0)
"""The small ones find faults that add little to what the stable version does anyway, which a large
ratio never would, however many sessions there are."""
RANK_BETS = (0.1, 0.25, 0.5, 0.9)
RATE_RATIOS = (1.5, 4.0, 20.0)


class Bets:
    """The logarithms of products of bets, one per alternative."""

    def __init__(self, num_alternatives: int) -> None:
        self.logs = [0.0] * num_alternatives

    @property
    def log_evidence(self) -> float:
        """The logarithm of the mean of the products."""
        most = max(self.logs)
        total = math.fsum(math.exp(log - most) for log in self.logs)
        return most + math.log(total / len(self.logs))

    def multiply(self, bets: Sequence[float]) -> None:
        for i, bet in enumerate(bets):
            self.logs[i] += math.log(bet)


class EventEvidence(Bets):
    """Bad events, each the first of its session, with the canary's share of sessions then."""

    def __init__(self) -> None:
        super().__init__(len(ODDS_RATIOS))

    def note(self, is_canary: bool, share: float) -> None:
        self.multiply([event_bet(is_canary, share, ratio) for ratio in ODDS_RATIOS])


class RankEvidence(Bets):
    """Ranks of the canary: 0 the fastest of `num_others` + 1, `num_others` the slowest."""

    def __init__(self) -> None:
        super().__init__(len(RANK_BETS))

    def note(self, rank: float, num_others: int) -> None:
        self.multiply([1 + bet * (2 * rank / num_others - 1) for bet in RANK_BETS])


class RateEvidence(Bets):
    """Trials of which at most a share of `bound` should be hits; a bound of zero allows none."""

    def __init__(self, bound: float) -> None:
        super().__init__(len(RATE_RATIOS))
        self._bound = bound
        self._rates = [min(bound * ratio, (1 + bound) / 2) for ratio in RATE_RATIOS]

    def note(self, num_trials: int, num_hits: int) -> None:
        if not self._bound:
            if num_hits:
                self.logs = [math.inf] * len(self.logs)
            return
        for i, rate in enumerate(self._rates):
            self.logs[i] += num_hits * math.log(rate / self._bound)
            self.logs[i] += (num_trials - num_hits) * math.log((1 - rate) / (1 - self._bound))

    @property
    def log_evidence(self) -> float:
        return math.inf if math.inf in self.logs else super().log_evidence


def event_bet(is_canary: bool, share: float, ratio: float) -> float:
    """The bet that the odds of the canary's part are `ratio` times what its share gives."""
    alternative = share * ratio / (1 + share * (ratio - 1))
    return alternative / share if is_canary else (1 - alternative) / (1 - share)
