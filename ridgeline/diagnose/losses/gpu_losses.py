"""What a GPU's counters take out of computing: time in which it waited, time in which it was slow.

A server over HTTP says how long prompts and answers took, not whether the device worked meanwhile.
NVML does, where the GPU can be read (measure/server/gpu.py):

    idle     while requests were in flight, no kernel ran: launching, planning, sampling → host
    slowed   the clock was held down for heat or power → slow, at most what the clock lost

Both are moved out of prefill and decode, so that the losses still add up. "At most", because a step
that waits for memory loses less than its clock. Utilisation says that *some* kernel ran, so that
the idle part is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ridgeline.diagnose.losses.latency_losses import Blame
from ridgeline.records import RunTrace
from ridgeline.stats import Interval

COMPUTING = ("prefill", "decode", "interference", "prefix_miss")


def with_gpu(found: Blame, run: RunTrace, told: Mapping[str, float]) -> Blame:
    """The same losses, told apart further by `gpu_busy_share`, `gpu_clock_share` and
    `gpu_slowed_share`; unchanged where they are not told.
    """
    shares = dict(found.shares)
    slow = told.get("gpu_slowed_share", 0.0) * (1 - told.get("gpu_clock_share", 1.0))
    _move(shares, "slow", slow)
    busy, in_flight = told.get("gpu_busy_share"), in_flight_share(run)
    if busy is not None and in_flight > 0 and not run.steps:
        _move(shares, "host", max(0.0, 1 - busy / in_flight))
    return msgspec.structs.replace(found, shares=shares)


def in_flight_share(run: RunTrace) -> float:
    """The part of the run in which somebody waited for the server."""
    spans = sorted((r.sent_s, r.token_s[-1]) for r in run.requests if r.token_s)
    covered, until_s = 0.0, 0.0
    for begin_s, end_s in spans:
        covered += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return min(1.0, covered / run.duration_s) if run.duration_s > 0 else 0.0


def _move(shares: dict[str, Interval], to: str, part: float) -> None:
    """A part of all computing becomes another loss."""
    for name in COMPUTING:
        taken, kept = (_scaled(shares[name], by) for by in (part, 1 - part))
        shares[name], shares[to] = kept, _sum(shares[to], taken)


def _scaled(share: Interval, by: float) -> Interval:
    return Interval(low=share.low * by, mid=share.mid * by, high=share.high * by)


def _sum(a: Interval, b: Interval) -> Interval:
    return Interval(low=a.low + b.low, mid=a.mid + b.mid, high=a.high + b.high)
