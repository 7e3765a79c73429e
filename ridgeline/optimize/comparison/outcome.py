"""When a measured ratio of two configurations counts as a change.

Two configurations are measured in rounds, each under the same load and seed, so that what the round
had in common (prompts, arrivals, the state of the machine) cancels in the ratio. The ratio of a
round is one observation, however many requests it served: requests of one run share a queue and are
not independent.

Testing after every round and stopping at the first significant one would find gains in noise. Looks
before the last therefore require 99 % and the last one 95 % (after Haybittle and Peto), or 97.5 %
if it follows extra rounds, which only a side that seems to gain gets.
"""

from __future__ import annotations

from ridgeline.stats import Interval, Outcome

INTERIM_LEVEL = 0.99
MIN_GAIN = 0.02  # a smaller gain is not worth a change, however certain it is
WORTHWHILE = 0.08  # a rung that certainly gains less than this is "unchanged"


def outcome_of(ratio: Interval) -> Outcome:
    """Outcome of new/old, where more is better.

    "unchanged" excludes a worthwhile gain; it does not exclude a small loss.
    """
    if ratio.low > 1 and ratio.mid > 1 + MIN_GAIN:
        return "improved"
    if ratio.high < 1 and ratio.mid < 1 / (1 + MIN_GAIN):
        return "regressed"
    return "unchanged" if ratio.high <= 1 + WORTHWHILE else "inconclusive"
