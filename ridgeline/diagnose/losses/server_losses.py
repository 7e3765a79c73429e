"""Latency losses of a server without step records, from the client's trace and the server's means.

The server's histograms give the mean time that requests waited and computed; its gauges show which
resource was exhausted while they waited. Both are passed as plain numbers (`queue_s`,
`kv_used_share_p95`, …) under the names of `ridgeline.measure.monitors.server_metrics`. If a server
reports less, the time stays with its stage: without a queue time, the whole time to first token
counts as prefill.

Individual requests did not wait for the mean time. Prefill time varies less than queue time, so
that each request is given the mean prefill, or less if its first token came sooner; the remainder
of its time to first token is divided between queue and front end in proportion to their means.
Giving every request the mean queue time instead would hide a growing queue: early requests waited
less than the mean, and late ones would appear to compute. If the server times each request
(`started_s`), that is used.

Not all queue time is waiting for a slot. A request that arrives during a step waits until the step
ends and is then admitted; nothing was exhausted. Servers count as *waiting* only the requests that
were not admitted, so by Little's law `waited_s` (mean number waiting x duration / requests) is the
part of the queue with an exhausted resource; the rest is attributed to no cause. Of that part,
`full_waiting_share` passed with every slot taken, `spent_waiting_share` with the token budget used
up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ridgeline.diagnose.losses.latency_losses import LOSSES, LatencyLosses, shares_of
from ridgeline.records import RequestTrace, RunTrace

FULL_KV = 0.9


def attribute_server_latency(
    run: RunTrace, metrics: Mapping[str, float], missed_prefix: float = 0.0
) -> LatencyLosses | None:
    """Attribute latency to losses by the server's metrics, which may be empty.

    Returns None if no request received tokens.
    """
    done = [request for request in run.requests if request.error is None and request.token_s]
    if not done:
        return None
    stages, short = _stages(done, metrics), _exhausted_shares(metrics)
    rows = [_of_request(request, stages, short, missed_prefix) for request in done]
    totals = [max(r.token_s[-1] - r.scheduled_s, 1e-9) for r in done]
    return LatencyLosses(
        shares=shares_of(rows, totals), num_requests=len(done), total_s=sum(totals)
    )


class _Stages(NamedTuple):
    """How the time to first token is divided.

    `prefill_s`: mean prefill time. `queue_share`: share of the remainder that is queueing. `rest`:
    the loss that is given what is left.
    """

    prefill_s: float
    queue_share: float
    rest: str


def _exhausted_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Share of the queue time by the exhausted resource.

    The sum is less than 1 if requests also waited for the step in progress to end.
    """
    queue_s, waited_s = metrics.get("queue_s"), metrics.get("waited_s")
    waited = 1.0 if not queue_s or waited_s is None else min(1.0, waited_s / queue_s)
    if metrics.get("kv_used_share_p95", 0.0) > FULL_KV or metrics.get("preemptions", 0) > 0:
        return {"kv": waited}
    full = metrics.get("full_waiting_share", 1.0)
    spent = metrics.get("spent_waiting_share", 0.0)
    free = max(0.0, 1 - full - spent)
    return {"slots": waited * full, "backlog": waited * spent, "policy": waited * free}


def _stages(done: Sequence[RequestTrace], metrics: Mapping[str, float]) -> _Stages:
    to_first_s = [request.token_s[0] - request.sent_s for request in done]
    queue_s, prefill_s = metrics.get("queue_s"), metrics.get("prefill_s")
    if prefill_s is None:
        return _beyond(to_first_s, fmean(to_first_s) - (queue_s or 0.0), queue_s or 0.0, "prefill")
    if queue_s is None:  # if no request ever waited in the queue, the front end took the time
        return _Stages(prefill_s, 1.0 if metrics.get("waiting_p95", 1.0) > 0 else 0.0, "front")
    return _beyond(to_first_s, prefill_s, queue_s, "front")


def _beyond(to_first_s: Sequence[float], prefill_s: float, queue_s: float, rest: str) -> _Stages:
    """Choose the queue share for which the mean queue time equals the server's mean."""
    beyond_s = fmean(max(0.0, ttft_s - prefill_s) for ttft_s in to_first_s)
    return _Stages(prefill_s, min(1.0, queue_s / beyond_s) if beyond_s > 0 else 0.0, rest)


def _of_request(
    request: RequestTrace, stages: _Stages, short: Mapping[str, float], missed_prefix: float
) -> dict[str, float]:
    lost = dict.fromkeys(LOSSES, 0.0)
    first_s, last_s = request.token_s[0], request.token_s[-1]
    to_first_s = first_s - request.sent_s
    computed_s = stages.prefill_s if request.started_s is None else first_s - request.started_s
    prefill_s = min(to_first_s, computed_s)
    queue_s = (to_first_s - prefill_s) * stages.queue_share
    if stages.rest == "front":
        lost["front"] = to_first_s - prefill_s - queue_s
    else:
        prefill_s = to_first_s - queue_s
    lost["client_send"] = request.sent_s - request.scheduled_s
    for loss, share in short.items():
        lost[loss] = queue_s * share
    lost["prefix_miss"] = missed_prefix * prefill_s
    lost["prefill"] = prefill_s - lost["prefix_miss"]
    lost["decode"] = last_s - first_s
    return lost
