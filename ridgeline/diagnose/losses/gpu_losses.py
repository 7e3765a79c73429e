"""Split the computing time of a server by its GPU's counters: idle and throttled time.

A server reports how long prompts and answers took, but not whether the device was working. NVML
reports that, if the GPU is readable from here (`ridgeline.measure.monitors.gpu`):

    idle      requests were in flight and no kernel ran (launching, planning, sampling) → host
    slowed    the clock was reduced because of heat or power → slow

Both are moved out of prefill and decode, so that the losses still add up. `slow` is an upper bound,
because a memory-bound step loses less than its clock; the idle part is a lower bound, because
utilisation only says that *some* kernel ran.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ridgeline.diagnose.losses.latency_losses import LatencyLosses
from ridgeline.records import RunTrace
from ridgeline.stats import Interval

COMPUTING = ("prefill", "decode", "interference", "prefix_miss")


def split_gpu_losses(
    losses: LatencyLosses, run: RunTrace, metrics: Mapping[str, float]
) -> LatencyLosses:
    """Split losses further by `gpu_busy_share`, `gpu_clock_share` and `gpu_slowed_share`.

    A metric that is missing changes nothing.
    """
    shares = dict(losses.shares)
    slow = metrics.get("gpu_slowed_share", 0.0) * (1 - metrics.get("gpu_clock_share", 1.0))
    _move(shares, "slow", slow)
    busy, in_flight = metrics.get("gpu_busy_share"), in_flight_share(run)
    if busy is not None and in_flight > 0 and not run.steps:
        _move(shares, "host", max(0.0, 1 - busy / in_flight))
    return msgspec.structs.replace(losses, shares=shares)


def in_flight_share(run: RunTrace) -> float:
    """The share of the run during which at least one request was in flight."""
    spans = sorted((r.sent_s, r.token_s[-1]) for r in run.requests if r.token_s)
    covered, until_s = 0.0, 0.0
    for begin_s, end_s in spans:
        covered += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return min(1.0, covered / run.duration_s) if run.duration_s > 0 else 0.0


def _move(shares: dict[str, Interval], to: str, part: float) -> None:
    """Move a part of every computing loss to the loss `to`."""
    for name in COMPUTING:
        moved, rest = (_scaled(shares[name], by) for by in (part, 1 - part))
        shares[name], shares[to] = rest, _sum(shares[to], moved)


def _scaled(share: Interval, by: float) -> Interval:
    return Interval(low=share.low * by, mid=share.mid * by, high=share.high * by)


def _sum(a: Interval, b: Interval) -> Interval:
    return Interval(low=a.low + b.low, mid=a.mid + b.mid, high=a.high + b.high)
