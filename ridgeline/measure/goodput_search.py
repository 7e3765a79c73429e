"""Goodput search: the largest load that a server carries while it keeps its SLO.

Load is a number: requests/s of an open loop, or users of a closed loop (`whole=True`). Attainment
falls as load rises, so: double from `low` until a probe fails, then bisect (geometrically)
between the last that held and the first that failed, until they are within `tolerance`. Few
probes: log2(high/low) + about 3.

Traps of short probes, and what is done about them:
- A queue needs time to hurt: at twice the capacity, the first requests of a short burst still
  meet a lax SLO. A probe is *saturated* when work drained long after the last arrival (see
  `saturated`), and a saturated probe does not hold, whatever its latencies say.
- Past saturation more load only queues. When doubling the load brings less than `PLATEAU` more
  goodput, the search stops.
- A share of few requests is luck: 97 of 100 in time may be a server that keeps 92 %. With
  `prove_within` a load holds only where the Wilson interval of its attainment lies above the
  promise, and fails where it lies below; in between the load is run again, with other requests,
  and the runs are pooled, at most so many. What is not shown then, is not claimed.
- A failing run need not be finished: `MissBudget` stops a run as soon as its outcome is certain.

What a probe is worth is its goodput: requests/s that met the SLO, from the first arrival to the
last token. `find_goodput` reports the largest load that held *and* every probe, so that the knee
can be drawn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypedDict, Unpack

import msgspec

from ridgeline.errors import BadInput
from ridgeline.measure.metrics.goodput import Goodput, goodput, meets
from ridgeline.measure.metrics.latency import e2e_s, succeeded
from ridgeline.records import RequestTrace, RunTrace, Slo
from ridgeline.stats import wilson_interval

Stopped = Literal["tolerance", "high", "plateau", "budget", "probes", "infeasible"]
RunAt = Callable[[float], Awaitable[RunTrace]]

PLATEAU = 0.03
MAX_DRAIN = 2.0
MIN_SERVED = 0.8


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one load. `reason` says why it does not hold ("" where it does)."""

    load: float
    holds: bool
    reason: str
    goodput: Goodput
    took_s: float
    run: RunTrace


class GoodputResult(msgspec.Struct, frozen=True, kw_only=True):
    """`best` is the probe at the largest load that held, None where none did (infeasible).

    `goodput_req_s` is its goodput, 0.0 without one. `failed_load` is the smallest load known to
    fail: the truth lies between `load` and it.
    """

    probes: tuple[Probe, ...]
    stopped: Stopped
    best: Probe | None

    @property
    def goodput_req_s(self) -> float:
        return self.best.goodput.goodput_req_s if self.best else 0.0

    @property
    def load(self) -> float | None:
        return self.best.load if self.best else None

    @property
    def failed_load(self) -> float | None:
        return min((probe.load for probe in self.probes if not probe.holds), default=None)


class SearchOptions(TypedDict, total=False):
    """`tolerance` (0.1): how near the failing load must be. `max_probes` (15). `whole`: users, not
    rates. `prove_within` runs of a load its interval must clear the promise (None: the share of one
    run decides). `clock` in seconds. `on_probe` sees each probe as it ends.
    """

    tolerance: float
    max_probes: int
    whole: bool
    prove_within: int | None
    clock: Callable[[], float]
    on_probe: Callable[[Probe], None]


async def find_goodput(
    run_at: RunAt,
    slo: Slo,
    low: float,
    high: float,
    budget_s: float,
    **options: Unpack[SearchOptions],
) -> GoodputResult:
    """Search [low, high] within `budget_s` seconds; at least one probe is always made.

    No probe is begun that would, at the length of the longest so far, end after the budget.
    """
    if not 0 < low <= high < math.inf:
        raise BadInput("the search needs 0 < low <= high", value=f"low={low:g} high={high:g}")
    clock, max_probes = options.get("clock", time.monotonic), options.get("max_probes", 15)
    search = _Search(low, high, options.get("tolerance", 0.1), options.get("whole", False))
    deadline_s = clock() + budget_s
    while True:
        begun_s = clock()
        runs = await _runs(run_at, search.load, slo, options.get("prove_within"))
        probe = _judge(search.load, runs, slo, clock() - begun_s, options.get("prove_within"))
        stopped = search.learn(probe)
        if "on_probe" in options:
            options["on_probe"](probe)
        if stopped is None:
            stopped = _limit_reached(search.probes, max_probes, deadline_s - clock())
        if stopped is not None:
            return GoodputResult(probes=tuple(search.probes), stopped=stopped, best=search.held)


async def _runs(run_at: RunAt, load: float, slo: Slo, most: int | None) -> list[RunTrace]:
    """One run at this load, or as many as it takes to know which side of the promise it is on."""
    runs = [await run_at(load)]
    while most is not None and len(runs) < most and not saturated(runs[-1]):
        judged = _pooled(runs, slo)
        if judged.attainment_low >= slo.attainment or judged.attainment_high < slo.attainment:
            break
        runs.append(await run_at(load))
    return runs


def least_requests(slo: Slo, most_runs: int) -> int | None:
    """Requests a run with which so many flawless runs show the promise; None: no number does."""
    if slo.attainment >= 1:
        return None
    total = next(n for n in range(1, 10**7) if wilson_interval(n, n).low >= slo.attainment)
    return -(-total // most_runs)


def _limit_reached(probes: list[Probe], max_probes: int, left_s: float) -> Stopped | None:
    if len(probes) >= max_probes:
        return "probes"
    return "budget" if max(probe.took_s for probe in probes) > left_s else None


class _Search:
    """The bracket: the largest load that held, the smallest that failed, and the next to try."""

    def __init__(self, low: float, high: float, tolerance: float, whole: bool) -> None:
        self._low, self._high, self._tolerance, self._whole = low, high, tolerance, whole
        self.load = float(math.ceil(low)) if whole else low
        self.probes: list[Probe] = []
        self.held: Probe | None = None
        self.failed: Probe | None = None

    def learn(self, probe: Probe) -> Stopped | None:
        """Take a probe in; choose the next load, or say why there is none."""
        self.probes.append(probe)
        before = self.held
        if not probe.holds:
            self.failed = probe
            return "infeasible" if before is None else self._bisect(before.load, probe.load)
        self.held = probe
        if self.failed is not None:
            return self._bisect(probe.load, self.failed.load)
        if before is not None and _gain(before, probe) < PLATEAU:
            return "plateau"
        if probe.load >= self._high:
            return "high"
        self.load = min(2 * probe.load, self._high)
        return None

    def _bisect(self, held: float, failed: float) -> Stopped | None:
        middle = math.sqrt(held * failed)
        if self._whole:
            middle = float(round(middle))
            if not held < middle < failed:
                middle = held + 1
            if middle >= failed:
                return "tolerance"
        if failed <= held * (1 + self._tolerance):
            return "tolerance"
        self.load = middle
        return None


def _gain(before: Probe, after: Probe) -> float:
    """Relative growth of goodput; infinite from nothing."""
    if before.goodput.goodput_req_s <= 0:
        return math.inf
    return after.goodput.goodput_req_s / before.goodput.goodput_req_s - 1


def _judge(
    load: float, runs: Sequence[RunTrace], slo: Slo, took_s: float, prove_within: int | None
) -> Probe:
    judged = _pooled(runs, slo)
    reason = _why_not(runs, slo, judged, prove=prove_within is not None)
    return Probe(
        load=load, holds=not reason, reason=reason, goodput=judged, took_s=took_s, run=runs[-1]
    )


def _pooled(runs: Sequence[RunTrace], slo: Slo) -> Goodput:
    """All requests of all runs judged as one; the rate is over the time of all of them."""
    requests = tuple(request for run in runs for request in run.requests)
    duration_s = sum(run.duration_s for run in runs)
    return goodput(msgspec.structs.replace(runs[0], requests=requests, duration_s=duration_s), slo)


def _why_not(runs: Sequence[RunTrace], slo: Slo, judged: Goodput, *, prove: bool) -> str:
    if judged.num_failed > slo.error_rate * judged.num_requests:
        share = judged.num_failed / judged.num_requests
        return f"{share:.0%} of requests failed (limit {slo.error_rate:.0%})"
    if not judged.holds:
        missed = ", ".join(f"{name} x{count}" for name, count in sorted(judged.misses.items()))
        return f"attainment {judged.attainment:.0%} < {slo.attainment:.0%} (missed: {missed})"
    if any(map(saturated, runs)):
        return "saturated: requests came faster than they were served"
    if prove and judged.attainment_low < slo.attainment:
        low, high = judged.attainment_low, judged.attainment_high
        return f"not shown: attainment {judged.attainment:.1%} [{low:.1%}, {high:.1%}]"
    return ""


def saturated(run: RunTrace) -> bool:
    """Did an open loop outrun the server?

    Two signs together: after the last arrival the run went on for more than MAX_DRAIN typical
    latencies (the median of the first third of requests, which met the shortest queue), and
    requests were served at less than MIN_SERVED of the rate at which they came. A closed loop
    cannot outrun.
    """
    done = succeeded(run.requests)
    if run.arrivals.startswith("closed") or len(done) < 2:
        return False
    last_s = max(request.scheduled_s for request in run.requests)
    early = sorted(done, key=lambda request: request.scheduled_s)[: max(1, len(done) // 3)]
    typical_s = statistics.median(e2e_s(request) or 0.0 for request in early)
    ends = [request.finished_s or 0.0 for request in done]
    drain_s = max(ends) - last_s
    return drain_s > MAX_DRAIN * typical_s and last_s < MIN_SERVED * max(ends)


class MissBudget:
    """Stops a run of `num_requests` once so many have missed the SLO that it cannot hold any more.

    Exact: it never changes a probe's verdict, only what the failing ones cost. Pass it to
    `run_load(on_finish=…)`; it counts one run.
    """

    def __init__(self, slo: Slo, num_requests: int) -> None:
        self._slo = slo
        self._num_requests = num_requests
        self._missed = 0

    def __call__(self, request: RequestTrace) -> str | None:
        self._missed += not meets(request, self._slo)
        # the very comparison that `goodput` makes, so that rounding cannot part the two
        best_possible = (self._num_requests - self._missed) / self._num_requests
        if best_possible >= self._slo.attainment:
            return None
        return f"the SLO is lost: {self._missed} requests have missed it"
