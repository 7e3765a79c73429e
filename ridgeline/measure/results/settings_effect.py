"""Did a change of the server's settings change anything? Said only where the figures can say it.

A metric that did not come out significantly different proves nothing: noise hides changes as well
as it makes them up. So there are three answers:

- *unchanged*: of every headline figure (the means, and the rates) the whole interval lies within ± the
  threshold. Each must pass its own test, so that no correction for their number is due (Berger,
  "Multiparameter hypothesis testing and acceptance sampling", Technometrics 1982).
- *improved*, or *regressed* if any figure did: at least one of them differs by Holm's step-down
  test at 5 %, which allows for their
  number, and by an interval that reaches beyond the threshold: a dozen metrics at 5 % each would
  find a difference in every other pair of equal runs. Never from one run a side: two runs of one
  server on a shared machine have differed by a quarter, one way and then the other.
- *inconclusive*: anything else, with how many requests (or runs) a side would show in four of five
  tries that there is none, if there is none: every figure's standard error has to be small enough
  for its interval to fit, Bonferroni's share of the misses each, and it shrinks with the root of
  their number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from ridgeline.measure.results.comparison import POWER, Judgement
from ridgeline.measure.results.result_file import RATES, LoadedResult
from ridgeline.stats import NUM_DRAWS, Outcome

LEVEL = 0.05
MISSED, NORMAL = 0.2, statistics.NormalDist()
ONE_RUN = "one run a side: what differs from run to run is not in it"


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """`needed`: requests (`unit` "requests") or runs a side that would show that there is none.

    None where something else is in the way, or nothing.
    """

    outcome: Outcome
    sentence: str
    needed: int | None = None
    unit: str = ""


def effect_of(
    found: Sequence[Judgement],
    a: Sequence[LoadedResult],
    b: Sequence[LoadedResult],
    threshold: float,
) -> Effect:
    """Of the judgements of two sides that differ in their settings alone."""
    effect = _effect(found, a, b, threshold)
    if len(a) > 1 and len(b) > 1:
        return effect
    return msgspec.structs.replace(effect, sentence=f"{effect.sentence}; {ONE_RUN}")


def _effect(
    found: Sequence[Judgement],
    a: Sequence[LoadedResult],
    b: Sequence[LoadedResult],
    threshold: float,
) -> Effect:
    headline = [each for each in found if _is_headline(each.metric)]
    known = [each for each in headline if each.detectable is not None]
    if not known:
        return Effect(outcome="inconclusive", sentence="no figure has an interval: repeat the runs")
    changed = [each for each in _significant(known) if _beyond(each, threshold)]
    if changed and min(len(a), len(b)) > 1:
        worse = any(each.outcome == "regressed" for each in changed)
        outcome: Outcome = "regressed" if worse else "improved"
        return Effect(outcome=outcome, sentence=f"it changed {_told(changed)}")
    if changed:
        seen = f"these runs differ by {_told(changed)}, and nothing says that the change did it"
        return Effect(outcome="inconclusive", sentence=f"{seen}: repeat both sides, in turns")
    limit = f"±{100 * threshold:g}%"
    wide = [each for each in known if not _within(each, threshold)]
    drifted = [each for each in wide if "drift" in each.reason]
    if drifted:
        return Effect(outcome="inconclusive", sentence=f"{drifted[0].metric}: {drifted[0].reason}")
    if not wide:
        return Effect(outcome="unchanged", sentence=f"within {limit}: {_told(known)}")
    count, unit = _observations(a, b)
    needed = max(_needed(each, count, threshold, len(known)) for each in wide)
    said = f"{limit} is narrower than what was seen: {_told(wide)}"
    more = f"about {needed:,} {unit} a side would show it if there is none"
    return Effect(outcome="inconclusive", sentence=f"{said}; {more}", needed=needed, unit=unit)


def _is_headline(metric: str) -> bool:
    return metric in RATES or metric.endswith("_mean")


def _beyond(each: Judgement, threshold: float) -> bool:
    return each.high > 1 + threshold or each.low < 1 / (1 + threshold)


def _within(each: Judgement, threshold: float) -> bool:
    return not _beyond(each, threshold)


def _significant(known: Sequence[Judgement]) -> list[Judgement]:
    """Holm: the smallest p-value against 5 % / n, the next against 5 % / (n - 1), until one fails.

    A bootstrap's zero is as small as its draws can tell.
    """
    passed: list[Judgement] = []
    for each in sorted(known, key=lambda each: each.p_value or 0.0):
        p_value = max(each.p_value or 0.0, 1 / NUM_DRAWS)
        if "drift" in each.reason or p_value > LEVEL / (len(known) - len(passed)):
            break
        passed.append(each)
    return passed


def _observations(a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> tuple[int, str]:
    if len(a) > 1 and len(b) > 1:
        return min(len(a), len(b)), "runs"
    sizes = [len(values) for each in (*a, *b) for values in each.samples.values() if values]
    return min(sizes), "requests"


def _needed(each: Judgement, count: int, threshold: float, num_figures: int) -> int:
    error = math.log1p(each.detectable or 0.0) / POWER
    room = NORMAL.inv_cdf(1 - LEVEL / 2) + NORMAL.inv_cdf(1 - MISSED / 2 / num_figures)
    return max(count + 1, math.ceil(count * (room * error / math.log1p(threshold)) ** 2))


def _told(found: Sequence[Judgement]) -> str:
    return ", ".join(
        f"{each.metric} [{100 * (each.low - 1):+.1f}%, {100 * (each.high - 1):+.1f}%]"
        for each in found
    )
