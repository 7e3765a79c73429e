"""Whether traffic has drifted from the workload that a server was tuned for.

Every part of the shape is tested: lengths by a chi-squared test of two histograms (by their means
where a server has no histogram), prefix sharing by its interval over the intervals of the sample.
The p-values are corrected for their number. A difference that is certain and small is no drift: it
must also be large enough to move a configuration (`LEAST_*`). Requests that come faster than before
are a drift when they use up what the tuned server sustained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.measure.monitors.traffic import TrafficSample
from ridgeline.records.traffic import LengthProfile, TrafficProfile
from ridgeline.stats import hochberg, normal_z, ratio_of_sums_interval

ALPHA = 0.01
LEAST_MEAN_RATIO = 1.2  # of mean lengths, in either direction
LEAST_DISTANCE = 0.2  # total variation distance of two histograms of lengths
LEAST_SHARE_CHANGE = 0.1  # of prompt tokens
LEAST_REQUESTS = 30
NEARLY_FULL = 0.9  # of the load that the tuned server sustained
MIN_EXPECTED = 5.0  # requests per bin, below which bins are joined


class DriftCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the shape: what it was tuned for, what is seen, and whether that is another.

    `p_value` is corrected for the number of tests; None where nothing could be tested (`note`).
    """

    part: str
    tuned: float
    seen: float
    drifted: bool
    p_value: float | None = None
    distance: float | None = None
    note: str = ""


def drift(tuned: TrafficProfile, sample: TrafficSample) -> tuple[DriftCheck, ...]:
    """Every part of the shape that both sides know."""
    seen = sample.profile
    checks = [
        _length_check(name, before, after)
        for name, before, after in (
            ("prompt tokens", tuned.prompt, seen.prompt),
            ("output tokens", tuned.output, seen.output),
        )
        if before is not None and after is not None
    ]
    if tuned.shared_share is not None and seen.shared_share is not None:
        checks.append(_share_check(tuned.shared_share, seen.shared_share, sample))
    corrected = hochberg([check.p_value for check in checks])
    return tuple(
        msgspec.structs.replace(
            check, p_value=p_value, drifted=check.drifted and (p_value or 0.0) < ALPHA
        )
        for check, p_value in zip(checks, corrected, strict=True)
    )


def load_check(sustained: float, rate: float) -> DriftCheck:
    """Whether requests come so fast that the server is near the load for which it was tuned.

    `sustained`: requests/s within the SLO that the search measured; `rate`: what comes now.
    """
    return DriftCheck(
        part="requests/s",
        tuned=sustained,
        seen=rate,
        drifted=rate > NEARLY_FULL * sustained,
        note=f"{rate / sustained:.0%} of what it sustained when it was tuned",
    )


def _length_check(part: str, before: LengthProfile, after: LengthProfile) -> DriftCheck:
    ratio = after.mean / before.mean if before.mean else math.inf
    large = max(ratio, 1 / max(ratio, 1e-9)) > LEAST_MEAN_RATIO
    check = DriftCheck(part=part, tuned=before.mean, seen=after.mean, drifted=large)
    if not before.number or not after.number:
        note = "the server reports a mean only, so its certainty is not known"
        return msgspec.structs.replace(check, note=note)
    if after.number < LEAST_REQUESTS:
        note = f"{after.number} requests are too few for a test"
        return msgspec.structs.replace(check, drifted=False, note=note)
    joined = _joined_bins(before, after)
    distance = _distance(*joined)
    return msgspec.structs.replace(
        check,
        drifted=large or distance > LEAST_DISTANCE,
        p_value=_p_value(*joined),
        distance=distance,
    )


def _joined_bins(before: LengthProfile, after: LengthProfile) -> tuple[list[int], list[int]]:
    """Counts of both in common bins, joined until each is expected to hold enough."""
    known = [set(profile.bounds) for profile in (before, after) if profile.bounds]
    bounds = sorted(set.intersection(*known)) if known else sorted(set(before.values))
    rows = [profile.counts_within(bounds) for profile in (before, after)]
    totals = [sum(row) for row in rows]
    least = MIN_EXPECTED * sum(totals) / max(1, min(totals))
    joined: tuple[list[int], list[int]] = ([], [])
    pending = [0, 0]
    for pair in zip(*rows, strict=True):
        pending = [a + b for a, b in zip(pending, pair, strict=True)]
        if sum(pending) >= least:
            for side, count in zip(joined, pending, strict=True):
                side.append(count)
            pending = [0, 0]
    if joined[0]:
        for side, count in zip(joined, pending, strict=True):
            side[-1] += count
    return joined


def _distance(before: Sequence[int], after: Sequence[int]) -> float:
    """Total variation distance: the share of requests that would have to change their bin."""
    if not before:
        return 0.0
    a, b = sum(before), sum(after)
    return sum(abs(x / a - y / b) for x, y in zip(before, after, strict=True)) / 2


def _p_value(before: Sequence[int], after: Sequence[int]) -> float:
    if len(before) < 2:
        return 1.0
    from scipy.stats import chi2_contingency

    return float(chi2_contingency([before, after], correction=False).pvalue)


def _share_check(tuned: float, seen: float, sample: TrafficSample) -> DriftCheck:
    large = abs(seen - tuned) > LEAST_SHARE_CHANGE
    check = DriftCheck(part="prefix sharing", tuned=tuned, seen=seen, drifted=large)
    if len(sample.hits) < 3:
        note = "too few intervals for a test"
        return msgspec.structs.replace(check, note=note)
    interval = ratio_of_sums_interval(sample.hits, sample.queries)
    error = max(1e-6, (interval.high - interval.low) / 2 / normal_z(interval.level))
    p_value = math.erfc(abs(seen - tuned) / error / math.sqrt(2))
    return msgspec.structs.replace(check, p_value=p_value)
