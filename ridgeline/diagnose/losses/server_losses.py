"""The same losses for a server that gives no step records: the client's instants, and its means.

The server's own histograms say how long requests waited and computed on average; its gauges say
what was short while they waited. Both come in as plain numbers (`queue_s`, `kv_used_share_p95`, …),
under the names of measure/server. What the server does not tell stays with its stage: without a
queue time all of the time to first token counts as prefill.

A mean is not what each request waited. Of the two, computing a prompt varies least, so each
request computes for the mean prefill, or less where its first token came sooner; what is left of
its time to first token is queue and front end, shared as their means are. Giving every request the
mean queue instead would lose most of a queue that grows: those in front waited less than the mean,
and those behind would be said to compute. A server that times each request itself (`started_s`)
is believed request by request.

A queue time is not all waiting for a slot. Whoever comes while a step runs waits until it has ended
and is then let in: no slot was short. What servers count as *waiting* is who was not let in, so by
Little's law `waited_s` (mean number waiting x duration / requests) is the part of the queue that
something was short for; the rest belongs to no cause. Of that part, `full_waiting_share` is with
every slot taken, and `spent_waiting_share` with no tokens left in the step's budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ridgeline.diagnose.losses.latency_losses import LOSSES, Blame, shares_of
from ridgeline.records import RequestTrace, RunTrace

FULL_KV = 0.9


def blame_server(
    run: RunTrace, told: Mapping[str, float], missed_prefix: float = 0.0
) -> Blame | None:
    """None where no request had tokens. `told` may be empty."""
    done = [request for request in run.requests if request.error is None and request.token_s]
    if not done:
        return None
    stages, short = _stages(done, told), _short(told)
    rows = [_of_request(request, stages, short, missed_prefix) for request in done]
    totals = [max(r.token_s[-1] - r.scheduled_s, 1e-9) for r in done]
    return Blame(shares=shares_of(rows, totals), num_requests=len(done), total_s=sum(totals))


class _Stages(NamedTuple):
    """Of the time to first token: the mean of computing, and how much of the rest is queue.

    `rest` is where the remainder goes that is neither.
    """

    prefill_s: float
    queue_share: float
    rest: str


def _short(told: Mapping[str, float]) -> dict[str, float]:
    """What was short while requests queued, as parts of their queue; less than 1 in all where some
    of it was waiting for a step to end.
    """
    queue_s, waited_s = told.get("queue_s"), told.get("waited_s")
    waited = 1.0 if not queue_s or waited_s is None else min(1.0, waited_s / queue_s)
    if told.get("kv_used_share_p95", 0.0) > FULL_KV or told.get("preemptions", 0) > 0:
        return {"kv": waited}
    full, spent = told.get("full_waiting_share", 1.0), told.get("spent_waiting_share", 0.0)
    free = max(0.0, 1 - full - spent)
    return {"slots": waited * full, "backlog": waited * spent, "policy": waited * free}


def _stages(done: Sequence[RequestTrace], told: Mapping[str, float]) -> _Stages:
    to_first_s = [request.token_s[0] - request.sent_s for request in done]
    queue_s, prefill_s = told.get("queue_s"), told.get("prefill_s")
    if prefill_s is None:
        return _beyond(to_first_s, fmean(to_first_s) - (queue_s or 0.0), queue_s or 0.0, "prefill")
    if queue_s is None:  # somebody waited, or nobody did: then it was the front end
        return _Stages(prefill_s, 1.0 if told.get("waiting_p95", 1.0) > 0 else 0.0, "front")
    return _beyond(to_first_s, prefill_s, queue_s, "front")


def _beyond(to_first_s: Sequence[float], prefill_s: float, queue_s: float, rest: str) -> _Stages:
    """The share that makes the requests' queues add up to what the server's mean says."""
    beyond_s = fmean(max(0.0, each - prefill_s) for each in to_first_s)
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
    for what, part in short.items():
        lost[what] = queue_s * part
    lost["prefix_miss"] = missed_prefix * prefill_s
    lost["prefill"] = prefill_s - lost["prefix_miss"]
    lost["decode"] = last_s - first_s
    return lost
