"""Whether a change of the server's settings had an effect, as far as the figures can show it.

A metric without a significant difference proves nothing: noise hides changes as well as it
simulates them. The outcomes are:

- *unchanged*: the whole interval of every headline figure (means and rates) is within ± the
  threshold. Each must pass a separate test, so that no correction for their number is due (Berger,
  "Multiparameter hypothesis testing and acceptance sampling", Technometrics 1982).
- *improved*, or *regressed* if any figure did: at least one of them differs by Holm's step-down
  test at 5 %, which allows for their
  number, and by an interval that reaches beyond the threshold: a dozen metrics at 5 % each would
  find a difference in every other pair of equal runs. Never from one run a side: two runs of one
  server on a shared machine have differed by a quarter, one way and then the other.
- *inconclusive*: otherwise; with the number of requests (or runs) per side that would show the
  absence of an effect in four of five attempts. The standard error of every figure, which shrinks
  with the root of that number, must be small enough for its interval to fit (with Bonferroni's
  share of the misses for each).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from ridgeline.measure.results.comparison import POWER, MetricComparison
from ridgeline.measure.results.result_file import RATES, LoadedResult
from ridgeline.stats import NUM_DRAWS, Outcome

LEVEL = 0.05
MISSED, NORMAL = 0.2, statistics.NormalDist()
ONE_RUN = "with one run per side, run-to-run variance is unknown"


class SettingsEffect(msgspec.Struct, frozen=True, kw_only=True):
    """`needed`: requests or runs (`unit`) per side that would show the absence of an effect.

    None if the outcome is decided, or if more data would not help.
    """

    outcome: Outcome
    sentence: str
    needed: int | None = None
    unit: str = ""


def settings_effect(
    found: Sequence[MetricComparison],
    a: Sequence[LoadedResult],
    b: Sequence[LoadedResult],
    threshold: float,
) -> SettingsEffect:
    """The effect, from the comparisons of two sides that only differ in their settings."""
    effect = _effect(found, a, b, threshold)
    if len(a) > 1 and len(b) > 1:
        return effect
    return msgspec.structs.replace(effect, sentence=f"{effect.sentence}; {ONE_RUN}")


def _effect(
    found: Sequence[MetricComparison],
    a: Sequence[LoadedResult],
    b: Sequence[LoadedResult],
    threshold: float,
) -> SettingsEffect:
    headline = [figure for figure in found if _is_headline(figure.metric)]
    known = [figure for figure in headline if figure.detectable is not None]
    if not known:
        return SettingsEffect(
            outcome="inconclusive", sentence="no figure has an interval; repeat the runs"
        )
    changed = [figure for figure in _significant(known) if _beyond(figure, threshold)]
    if changed and min(len(a), len(b)) > 1:
        worse = any(figure.outcome == "regressed" for figure in changed)
        outcome: Outcome = "regressed" if worse else "improved"
        return SettingsEffect(outcome=outcome, sentence=f"it changed {_intervals(changed)}")
    if changed:
        seen = f"these runs differ by {_intervals(changed)}, which the change need not have caused"
        return SettingsEffect(
            outcome="inconclusive", sentence=f"{seen}; repeat both sides, interleaved"
        )
    limit = f"±{100 * threshold:g}%"
    wide = [figure for figure in known if not _within(figure, threshold)]
    drifted = [figure for figure in wide if "drift" in figure.reason]
    if drifted:
        return SettingsEffect(
            outcome="inconclusive", sentence=f"{drifted[0].metric}: {drifted[0].reason}"
        )
    if not wide:
        return SettingsEffect(outcome="unchanged", sentence=f"within {limit}: {_intervals(known)}")
    count, unit = _observations(a, b)
    needed = max(_needed(figure, count, threshold, len(known)) for figure in wide)
    observed = f"{limit} is narrower than the intervals: {_intervals(wide)}"
    more = f"about {needed:,} {unit} per side would show the absence of an effect"
    return SettingsEffect(
        outcome="inconclusive", sentence=f"{observed}; {more}", needed=needed, unit=unit
    )


def _is_headline(metric: str) -> bool:
    return metric in RATES or metric.endswith("_mean")


def _beyond(figure: MetricComparison, threshold: float) -> bool:
    return figure.high > 1 + threshold or figure.low < 1 / (1 + threshold)


def _within(figure: MetricComparison, threshold: float) -> bool:
    return not _beyond(figure, threshold)


def _significant(known: Sequence[MetricComparison]) -> list[MetricComparison]:
    """Holm: the smallest p-value against 5 % / n, the next against 5 % / (n - 1), until one fails.

    A bootstrap p-value of 0 counts as one draw.
    """
    passed: list[MetricComparison] = []
    for figure in sorted(known, key=lambda figure: figure.p_value or 0.0):
        p_value = max(figure.p_value or 0.0, 1 / NUM_DRAWS)
        if "drift" in figure.reason or p_value > LEVEL / (len(known) - len(passed)):
            break
        passed.append(figure)
    return passed


def _observations(a: Sequence[LoadedResult], b: Sequence[LoadedResult]) -> tuple[int, str]:
    if len(a) > 1 and len(b) > 1:
        return min(len(a), len(b)), "runs"
    sizes = [len(values) for result in (*a, *b) for values in result.samples.values() if values]
    return min(sizes), "requests"


def _needed(figure: MetricComparison, count: int, threshold: float, num_figures: int) -> int:
    error = math.log1p(figure.detectable or 0.0) / POWER
    room = NORMAL.inv_cdf(1 - LEVEL / 2) + NORMAL.inv_cdf(1 - MISSED / 2 / num_figures)
    return max(count + 1, math.ceil(count * (room * error / math.log1p(threshold)) ** 2))


def _intervals(found: Sequence[MetricComparison]) -> str:
    return ", ".join(
        f"{figure.metric} [{100 * (figure.low - 1):+.1f}%, {100 * (figure.high - 1):+.1f}%]"
        for figure in found
    )
