"""Goodput search: the largest load at which a server meets its SLO.

Load is a number: requests/s of an open loop, or users of a closed loop (`whole=True`). Attainment
falls as load rises, so the search doubles the load from `low` until a probe fails, then bisects
(geometrically) between the last load that held and the first that failed, until they are within
`tolerance`: about log2(high/low) + 3 probes.

Short probes can mislead:
- A queue takes time to build up: at twice the capacity, the first requests of a short burst still
  meet a lax SLO. A probe is *is_saturated* if requests drained long after the last arrival, and a
  is_saturated probe does not hold, whatever its latencies.
- Beyond saturation, more load only adds to the queue. The search stops once doubling the load gains
  less than `PLATEAU` in goodput.
- A share of few requests is noisy: 97 of 100 in time may be a server that attains 92 %. With
  `prove_within`, a load holds only if the Wilson interval of its attainment is above the SLO, and
  fails if it is below; otherwise the load is run again with other requests, up to that many times,
  and the runs are pooled. A load that is still undecided does not hold.
- A failing run need not finish: `MissBudget` stops it once its outcome is certain.

The figure of a probe is its goodput: requests/s that met the SLO, from the first arrival to the
last token. `find_goodput` returns the largest load that held and every probe, to draw the knee.
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
from ridgeline.measure.metrics.latency import e2e_s, successful_requests
from ridgeline.records import RequestTrace, RunTrace, Slo
from ridgeline.stats import wilson_interval

Stopped = Literal["tolerance", "high", "plateau", "budget", "probes", "infeasible"]
RunAt = Callable[[float], Awaitable[RunTrace]]

PLATEAU = 0.03
MAX_DRAIN = 2.0
MIN_SERVED = 0.8


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One load. `reason`: why it does not hold ("" if it does). `run` is the last run at it."""

    load: float
    holds: bool
    reason: str
    goodput: Goodput
    took_s: float
    run: RunTrace


class GoodputResult(msgspec.Struct, frozen=True, kw_only=True):
    """`best` is the probe at the largest load that held, None if none did (infeasible).

    `failed_load` is the smallest load known to fail: the true limit is between `load` and it.
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
    """Options of `find_goodput`.

    `tolerance` (0.1): largest relative distance to the failing load. `max_probes` (15). `whole`:
    loads are users, not rates. `prove_within`: runs within which the interval of the attainment
    must be above the SLO (None: the attainment of one run decides). `clock`: seconds. `on_probe` is
    called with every probe.
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
    """Search [low, high] within `budget_s` seconds, with at least one probe.

    No probe starts that would exceed the budget if it took as long as the longest so far. Raises
    BadInput for an invalid range.
    """
    if not 0 < low <= high < math.inf:
        raise BadInput("the search needs 0 < low <= high", value=f"low={low:g} high={high:g}")
    clock, max_probes = options.get("clock", time.monotonic), options.get("max_probes", 15)
    bracket = _Bracket(low, high, options.get("tolerance", 0.1), options.get("whole", False))
    deadline_s = clock() + budget_s
    while True:
        started_s = clock()
        runs = await _runs(run_at, bracket.load, slo, options.get("prove_within"))
        probe = _make_probe(
            bracket.load, runs, slo, clock() - started_s, options.get("prove_within")
        )
        stopped = bracket.add(probe)
        if "on_probe" in options:
            options["on_probe"](probe)
        if stopped is None:
            stopped = _limit_reached(bracket.probes, max_probes, deadline_s - clock())
        if stopped is not None:
            return GoodputResult(probes=tuple(bracket.probes), stopped=stopped, best=bracket.held)


async def _runs(run_at: RunAt, load: float, slo: Slo, max_runs: int | None) -> list[RunTrace]:
    """Repeat this load until its interval is on one side of the SLO, at most `max_runs` times."""
    runs = [await run_at(load)]
    while max_runs is not None and len(runs) < max_runs and not is_saturated(runs[-1]):
        result = _pool(runs, slo)
        if result.attainment_low >= slo.attainment or result.attainment_high < slo.attainment:
            break
        runs.append(await run_at(load))
    return runs


def min_requests_per_run(slo: Slo, max_runs: int) -> int | None:
    """Requests per run with which `max_runs` flawless runs prove the SLO; None if none do."""
    if slo.attainment >= 1:
        return None
    total = next(n for n in range(1, 10**7) if wilson_interval(n, n).low >= slo.attainment)
    return -(-total // max_runs)


def _limit_reached(probes: list[Probe], max_probes: int, left_s: float) -> Stopped | None:
    if len(probes) >= max_probes:
        return "probes"
    return "budget" if max(probe.took_s for probe in probes) > left_s else None


class _Bracket:
    """The largest load that held, the smallest that failed, and the next load to try."""

    def __init__(self, low: float, high: float, tolerance: float, whole: bool) -> None:
        self._low, self._high, self._tolerance, self._whole = low, high, tolerance, whole
        self.load = float(math.ceil(low)) if whole else low
        self.probes: list[Probe] = []
        self.held: Probe | None = None
        self.failed: Probe | None = None

    def add(self, probe: Probe) -> Stopped | None:
        """Add a probe; choose the next load, or return why the search stops."""
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
    """Relative growth of goodput; infinite from 0."""
    if before.goodput.goodput_req_s <= 0:
        return math.inf
    return after.goodput.goodput_req_s / before.goodput.goodput_req_s - 1


def _make_probe(
    load: float, runs: Sequence[RunTrace], slo: Slo, took_s: float, prove_within: int | None
) -> Probe:
    result = _pool(runs, slo)
    reason = _failure_reason(runs, slo, result, prove=prove_within is not None)
    return Probe(
        load=load, holds=not reason, reason=reason, goodput=result, took_s=took_s, run=runs[-1]
    )


def _pool(runs: Sequence[RunTrace], slo: Slo) -> Goodput:
    """Goodput of all requests of all runs, over the sum of their durations."""
    requests = tuple(request for run in runs for request in run.requests)
    duration_s = sum(run.duration_s for run in runs)
    return goodput(msgspec.structs.replace(runs[0], requests=requests, duration_s=duration_s), slo)


def _failure_reason(runs: Sequence[RunTrace], slo: Slo, result: Goodput, *, prove: bool) -> str:
    if result.num_failed > slo.error_rate * result.num_requests:
        share = result.num_failed / result.num_requests
        return f"{share:.0%} of requests failed (limit {slo.error_rate:.0%})"
    if not result.holds:
        missed = ", ".join(f"{name} x{count}" for name, count in sorted(result.misses.items()))
        return f"attainment {result.attainment:.0%} < {slo.attainment:.0%} (missed: {missed})"
    if any(map(is_saturated, runs)):
        return "saturated: requests arrived faster than they were served"
    if prove and result.attainment_low < slo.attainment:
        low, high = result.attainment_low, result.attainment_high
        return f"not proved: attainment {result.attainment:.1%} [{low:.1%}, {high:.1%}]"
    return ""


def is_saturated(run: RunTrace) -> bool:
    """Whether an open loop exceeded the capacity of the server; never true of a closed loop.

    Two conditions: after the last arrival the run continued for more than MAX_DRAIN typical
    latencies (the median of the first third of requests, which met the shortest queue), and
    requests were served at less than MIN_SERVED of their arrival rate.
    """
    done = successful_requests(run.requests)
    if run.arrivals.startswith("closed") or len(done) < 2:
        return False
    last_s = max(request.scheduled_s for request in run.requests)
    early = sorted(done, key=lambda request: request.scheduled_s)[: max(1, len(done) // 3)]
    typical_s = statistics.median(e2e_s(request) or 0.0 for request in early)
    ends = [request.finished_s or 0.0 for request in done]
    drain_s = max(ends) - last_s
    return drain_s > MAX_DRAIN * typical_s and last_s < MIN_SERVED * max(ends)


class MissBudget:
    """Stops a run of `num_requests` once too many have missed the SLO for it to hold.

    Exact: it does not change the outcome of a probe, only the duration of failing ones. Pass a new
    one to every `run_load(on_finish=…)`.
    """

    def __init__(self, slo: Slo, num_requests: int) -> None:
        self._slo = slo
        self._num_requests = num_requests
        self._missed = 0

    def __call__(self, request: RequestTrace) -> str | None:
        self._missed += not meets(request, self._slo)
        # The same comparison as in `goodput`, so that rounding cannot make them differ.
        best_possible = (self._num_requests - self._missed) / self._num_requests
        if best_possible >= self._slo.attainment:
            return None
        return f"the SLO cannot be met: {self._missed} requests have missed it"
